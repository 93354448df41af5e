"""The records of several hosts of one run as one: their clocks, and the order of their records."""
