"""The membership protocol and the coordinator, as pure machines."""
