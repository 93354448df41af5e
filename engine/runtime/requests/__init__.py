"""Requests to a launcher while its job runs, as files in its run folder."""
