"""Pure parts of the benchmarks: rows, confidence intervals, costs read off events."""
