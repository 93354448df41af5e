"""Decides which commits are kept as checkpoints, who writes them, and what a whole checkpoint is."""
