"""The records of a run about the memory and the load of its devices."""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.history.record import StampedRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRecord(StampedRecord):
    """The writing worker held at most so many bytes of its GPU in a step: in tensors, and with free ones kept for them.

    A step without a record was within 1 % of the record before it. `predicted` is for a usual step of the owners then,
    0 if it is not known.
    """

    step: int
    allocated: int
    reserved: int
    predicted: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord(StampedRecord):
    """A GPU of the host computed for this share of the time, in `samples` of a second; `used` bytes were in use."""

    gpu: int
    samples: int
    busy: float
    used: int
