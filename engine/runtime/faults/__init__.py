"""Kinds of faults: one module per family, found by `registry.py`; a new kind is one function in one module."""
