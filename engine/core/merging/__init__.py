"""What several hosts know of one run, put together: their clocks, and the order of their records."""
