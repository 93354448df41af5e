"""The ranges of steps whose actions a run keeps, if it may not keep all.

Rules: never left out are the first range, the newest ones, and each range with a step near a failure, a fault or a
change of members. Of the others every second goes, then every second of the rest, so that the last ones lie evenly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from engine.core.history.process_records import ExitRecord, ResumedRecord
from engine.core.history.record import Record
from engine.core.history.run_records import (
    CommitRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    NoticeRecord,
    RaisedRecord,
    SuspicionRecord,
)

BEFORE, AFTER = 2, 3  # steps around the open step that a recovery is timed by: the last action, the healed shadows
_NEWEST = 2  # ranges


class MarkedSteps:
    """The steps that are kept, from the records of a run in the order of the file."""

    def __init__(self) -> None:
        self.committed = -1
        self.steps: set[int] = set()
        self._is_training = False

    def add(self, record: Record) -> None:
        """Adds the next record."""
        match record:
            case CommitRecord() | ResumedRecord():
                self.committed = record.step
            case GoRecord():
                self._is_training = True
            case EpochRecord() if self._is_training:
                self._mark()
            case FaultRecord() | RaisedRecord() | SuspicionRecord() | NoticeRecord():
                self._mark()
            case ExitRecord() if not record.expected:
                self._mark()

    def _mark(self) -> None:
        opened = self.committed + 1
        self.steps.update(range(max(0, opened - BEFORE), opened + AFTER + 1))


def marked_steps(records: Iterable[Record]) -> set[int]:
    """Returns the steps whose actions are kept for the recoveries of a run."""
    marked = MarkedSteps()
    for record in records:
        marked.add(record)
    return marked.steps


def superfluous(num_bytes: Mapping[int, int], kept: Collection[int], limit: int) -> set[int]:
    """Returns the ranges, by their numbers, to leave out so that the bytes of the others are at most `limit`.

    The `kept` ranges stay; if they alone are more than `limit`, all others are left out.
    """
    if sum(num_bytes.values()) <= limit:
        return set()
    last = max(num_bytes)
    always = {0, *range(last - _NEWEST + 1, last + 1), *kept}
    every = 1
    while True:
        every *= 2
        out = {number for number in num_bytes if number % every and number not in always}
        left = sum(size for number, size in num_bytes.items() if number not in out)
        if left <= limit or every > last:
            return out | ({number for number in num_bytes if number not in always} if left > limit else set())


def as_ranges(numbers: Iterable[int], span: int) -> tuple[tuple[int, int], ...]:
    """Returns ranges by their numbers as (first step, last step), neighbours joined."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        first, last = number * span, (number + 1) * span - 1
        if found and found[-1][1] == first - 1:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    return tuple(found)
