"""Pure functions on values. Standard library only; no torch, I/O, clock, threads or global randomness."""
