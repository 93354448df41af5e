"""Kinds of faults: one function for each in `kinds.py`; `registry.py` finds them."""
