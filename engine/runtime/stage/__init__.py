"""One stage: its layers, autograd segments, buffers, optimizers and hashes."""
