"""Hosts of one run, as values: who they are, which workers each gets, their frames, their leases, their losses."""
