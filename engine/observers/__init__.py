"""Loggers: observers of a run, each in a process of its own, which see the records and change nothing."""
