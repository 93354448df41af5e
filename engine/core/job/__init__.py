"""The job: its fields and their rules, its split into stages, its samples, and its memory by a model."""
