"""The commits that are kept as checkpoints, the workers that write each stage, and the form of a whole checkpoint."""
