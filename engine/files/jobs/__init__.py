"""Job files and the other layers of values from which a job is resolved."""
