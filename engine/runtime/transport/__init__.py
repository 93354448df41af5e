"""Transfers between workers: the data plane, groups, keys, bulk transfers, reductions."""
