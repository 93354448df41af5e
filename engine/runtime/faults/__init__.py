"""What can be done to a worker: one module per family, found by `registry.py`; adding a kind touches one place."""
