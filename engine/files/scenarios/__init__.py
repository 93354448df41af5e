"""Reads scenario and matrix files; defines their form and their JSON schemas."""
