"""Transfers between GPUs over NCCL, which has no tags: one communicator of each epoch, one thread of each worker."""
