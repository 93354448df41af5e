"""A worker: join, train, recover, leave; the executor of programs."""
