"""The role of the coordinator: its state in the store, this host there, and its process beside one that waits."""
