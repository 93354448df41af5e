"""A whole job in one process: workers are threads, for a debugger and for tests of properties."""
