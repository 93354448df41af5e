"""Hosts of one run: their keys in the store, their leases, the streams between them, workers on other hosts."""
