"""Benchmarks: each measures one goal, taking turns with a peer such as torchrun."""
