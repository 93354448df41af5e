"""Jobs, scenarios and matrices: their files, and the layers of values from which a job is resolved."""
