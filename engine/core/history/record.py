"""The base classes of all records of a run, and the version of their format.

Rules: the kind of a record, as its line names it, is the name of its class in lower case, without `Record`. A field
that may be missing in a line has a default, and is left out where it has that value. Times end in `_ns`: nanoseconds on
the host's monotonic clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VERSION = 2  # of the format: another field, or another meaning of one, makes it another; version 1 had no number


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of the history of a run; one that was added after the end of the run has no time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedRecord(Record):
    """A record with the worker that wrote it (-1: the agent), its process, and the time; the recorder adds them."""

    worker: int = 0
    pid: int = 0
    at_ns: int = 0


def kind_of(record: type[Record]) -> str:
    """Returns the kind of a record as its line names it, such as ``cut_short``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", record.__name__.removesuffix("Record")).lower()
