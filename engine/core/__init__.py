"""Pure rules: values in, values out. Standard library only; no torch, I/O, clock, threads or global randomness."""
