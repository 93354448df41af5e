"""Processes: the fork server and its children, signals, sockets, the lock of a host."""
