"""Processes: the fork server and its children, signals, sockets, locks of a host."""
