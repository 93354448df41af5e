"""Replicas of slots: values of the open step, the log, heal, streams, shards."""
