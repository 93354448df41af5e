"""Hosts of one run, as values: their frames, leases, ends and losses; the files with which a scheduler places them."""
