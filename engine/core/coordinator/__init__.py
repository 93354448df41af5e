"""The coordinator: a pure machine that decides for the whole job."""
