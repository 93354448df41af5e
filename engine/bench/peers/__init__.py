"""The other side of a benchmark: torch's own pipelining, torchrun and torchft."""
