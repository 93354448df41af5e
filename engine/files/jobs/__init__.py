"""Job files, and the layers of values that make a job."""
