"""The store of coordination as a protocol: keys, conditions and transactions."""
