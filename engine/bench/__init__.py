"""Benchmarks: each measures one promise, and its peer in the same run."""
