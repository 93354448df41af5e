"""Training from a Python program: the run is a child process, and a handle follows its records."""
