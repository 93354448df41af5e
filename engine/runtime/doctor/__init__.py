"""Checks of the host, and of leaks after a run."""
