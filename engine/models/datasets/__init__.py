"""The built-in data sources, pure functions of their keys."""
