"""Puts the actions of the workers between the other records of a run, in the order of time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from operator import attrgetter

from engine.core.history.record import Record, StampedRecord
from engine.core.history.run_records import ActionRecord


def merged(records: Iterable[Record], actions: Iterable[ActionRecord]) -> Iterator[Record]:
    """Yields each action before the first record that was written after its end; the records keep their order."""
    waiting = sorted(actions, key=attrgetter("end_ns"))
    place = 0
    for record in records:
        if isinstance(record, StampedRecord):
            while place < len(waiting) and waiting[place].end_ns <= record.at_ns:
                yield waiting[place]
                place += 1
        yield record
    yield from waiting[place:]
