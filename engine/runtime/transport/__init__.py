"""Transfers between workers: links, the data plane as a protocol over them, and NCCL behind the same protocol."""
