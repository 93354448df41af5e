"""The history of a run: its records, the lines that hold them, and what they add up to."""
