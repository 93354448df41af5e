"""Cases as values: a run to make, its facts in the run folder, and its result."""
