"""The protocol of a worker as a pure machine."""
