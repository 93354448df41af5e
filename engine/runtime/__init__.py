"""Effects: torch, processes, signals, sockets, the coordinator."""
