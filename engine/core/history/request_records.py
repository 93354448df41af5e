"""The records of a run about requests, files that others put into its folder while it runs."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.history.record import StampedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestRecord(StampedRecord):
    """The launcher accepts the faults of a request, a file in the run folder."""

    request: str
    faults: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRecord(StampedRecord):
    """The launcher refuses the faults of a request."""

    request: str
    reason: str
