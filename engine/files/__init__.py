"""YAML in, run folders out."""
