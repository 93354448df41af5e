"""Scenario and matrix files, their form and their JSON schema."""
