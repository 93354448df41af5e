"""The decisions of other hosts in the records of one that has heard them: its folder tells the run without theirs."""

from __future__ import annotations

from dataclasses import replace

from engine.core.history.process_records import ClockRecord, ExitRecord, HeardRecord
from engine.core.history.record import Record, StampedRecord
from engine.core.history.record_lines import decoded
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import EpochRecord

_EPOCH = '{"event":"epoch",'


class HeardDecisions:
    """Reads heard decisions as records of the host that heard them; their times come onto its clock, about."""

    def __init__(self) -> None:
        self._offsets_ns: dict[str, int] = {}  # of the clock of each other host, as last told

    def told(self, record: Record) -> StampedRecord | None:
        """Takes the next record of a host; returns the decision that it has heard, None for any other record."""
        if isinstance(record, ClockRecord):
            self._offsets_ns[record.of] = (record.least_ns + record.most_ns) // 2
        if not isinstance(record, HeardRecord):
            return None
        decision = decoded(record.line)
        if not isinstance(decision, StampedRecord):
            return None
        offset_ns = self._offsets_ns.get(record.of, decision.at_ns - record.at_ns)
        return _earlier(decision, offset_ns)


def coordinating_host(history: RunHistory) -> str:
    """Returns the host that coordinates the run of a folder, as its host has heard last; empty for that host."""
    heard = history.of(HeardRecord)
    num_epochs = sum(each.line.startswith(_EPOCH) for each in heard)
    return heard[-1].of if heard and len(history.epochs) <= num_epochs else ""


def _earlier(decision: StampedRecord, offset_ns: int) -> StampedRecord:
    """Returns a decision with all its times on a clock that is `offset_ns` behind."""
    moved = replace(decision, at_ns=decision.at_ns - offset_ns)
    if isinstance(moved, ExitRecord):
        return replace(moved, seen_ns=moved.seen_ns - offset_ns)
    if isinstance(moved, EpochRecord):
        verdict = (
            each if each.alive_ns is None else each._replace(alive_ns=each.alive_ns - offset_ns)
            for each in moved.verdict
        )
        return replace(moved, verdict=tuple(verdict))
    return moved
