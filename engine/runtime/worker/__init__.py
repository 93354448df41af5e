"""One worker: its life from start to exit, its training and recoveries, and the executor of programs."""
