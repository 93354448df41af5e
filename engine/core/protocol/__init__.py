"""The membership protocol, the coordinator and the policy of elastic jobs, as pure machines."""
