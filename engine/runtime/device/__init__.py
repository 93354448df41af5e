"""The device of a worker: where its layers compute, and the copies between it and the host."""
