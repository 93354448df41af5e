"""The base classes of all records of a run, and the version of their format.

Rules: the kind of a record in its line is the name of its class in snake case, without `Record`. A field that may be
missing in a line has a default; a line leaves it out if it has that value. Names of times end in `_ns`: nanoseconds on
the host's monotonic clock.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# Of the format: a change of a field or of its meaning needs a new number; version 1 had no number. Since version 3
# the end is recorded after the verdict; since version 5 actions and hashes stand in files of their own; since version 6
# a job keeps checkpoints; since version 7 lines are linked, and a seal comes before the end.
VERSION = 7
UNSEALED = 6  # is read as well; nothing proves that its records are whole
AGENT = -1  # the number of the agent in records that name a worker


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A record of the history of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StampedRecord(Record):
    """A record with its writer (a worker, or `AGENT`), the process and the time; they are added when it is written."""

    worker: int = 0
    pid: int = 0
    at_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadLine(Record):
    """A line of the file that is no record, such as the half of a line; a reader makes it, and no file has it."""

    number: int  # of the line, from 1


def kind_of(record: type[Record]) -> str:
    """Returns the kind of a record in its line, such as ``cut_short``."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", record.__name__.removesuffix("Record")).lower()
