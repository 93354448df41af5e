"""The built-in models, each a list of layers."""
