"""The peers of our side in the benchmarks: torch's pipelining, torchrun and torchft."""
