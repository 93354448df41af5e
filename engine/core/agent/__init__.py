"""The host agent as a pure machine: the ends of the workers of one host."""
