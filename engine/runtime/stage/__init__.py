"""One stage: its layers, buffers, optimizers and hashes; its replicas: logs, heals, streams, shards."""
