"""The terminal: colours, tables that fit its width, and the live picture of a run."""
