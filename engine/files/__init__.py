"""Reads YAML files and environment variables; reads and writes the files of run folders."""
