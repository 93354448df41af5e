"""The evidence of a run in its files: written as chains under a seal, and read again for each verdict."""
