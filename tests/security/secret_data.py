"""A data source that opens with a token only, as one of a user with an account does."""

from __future__ import annotations

from tests.e2e.user_batches import Microbatches

TOKEN = "hf-correct-horse-battery"  # noqa: S105 - a made-up one


class Gated(Microbatches):
    """Cuts batches by hand, for a reader with the token."""

    def __init__(self, seed: int, *, token: str, key_dim: int = 8):
        if token != TOKEN:
            raise PermissionError("the data source refuses the token")
        super().__init__(seed)
