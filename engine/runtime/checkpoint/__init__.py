"""Checkpoints at a worker: state to files, and back."""
