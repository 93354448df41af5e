"""The agent of a host and the coordinator: processes, messages, effects, faults, one session."""
