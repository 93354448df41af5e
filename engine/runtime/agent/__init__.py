"""The agent of a host and the coordinator: processes, messages, orders, faults, one session."""
