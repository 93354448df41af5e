"""Writes and reads the files of checkpoints, in a folder or in an object store."""
