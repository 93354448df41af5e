"""The agent of a host: processes, messages, faults, one session; the coordinator's driver, the keeper, the scribe."""
