"""The membership protocol: one state, and one table of events and phases."""
