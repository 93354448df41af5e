"""The history of a run: its records, their lines in the file, and the state that they add up to."""
