"""Reads YAML files and environment variables; reads and writes run folders, evidence and checkpoints."""
