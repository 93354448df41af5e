"""Checks of the host, and of what a run leaves behind."""
