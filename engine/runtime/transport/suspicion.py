"""Errors of a library of transfers as suspicions: a connection broke, and the agent decides why."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.core.errors import TransferFailedError


def suspicion(what: str, error: RuntimeError, peer: int | None = None) -> TransferFailedError:
    """Returns the exception for an error of a library; `peer` is the other end, which need not have failed."""
    return TransferFailedError(f"{what} failed: {error}", peer)


@contextlib.contextmanager
def suspecting(what: str, peer: int | None = None) -> Iterator[None]:
    """Turns a RuntimeError into a TransferFailedError."""
    try:
        yield
    except RuntimeError as error:
        raise suspicion(what, error, peer) from error
