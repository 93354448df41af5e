"""A run on several hosts: one agent on each."""
