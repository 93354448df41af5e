"""The cost of a program: bubble, memory, grids, and comparisons of schedules."""
