"""Processes: the fork server and its children, signals, locks, the kernel's side of them."""
