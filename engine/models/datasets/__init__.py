"""The built-in data, as pure functions of their keys."""
