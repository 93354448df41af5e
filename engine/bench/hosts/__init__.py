"""Benchmarks of runs on several hosts, each in a bed of namespaces on this machine."""
