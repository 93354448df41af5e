"""Pure parts of the benchmarks: rows, confidence intervals, and the work to redo, from events."""
