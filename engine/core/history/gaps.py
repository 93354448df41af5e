"""The parts of a run's record that a reader does not have, in sentences for reports and the status."""

from __future__ import annotations

from collections.abc import Iterator

from engine.core.history.heard_decisions import coordinating_host
from engine.core.history.process_records import HostRecord, LostRecord
from engine.core.history.record import UnreadLine
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ThinnedRecord
from engine.core.texts import counted, numbered

_MOST_NAMED = 5


def gaps(history: RunHistory) -> tuple[str, ...]:
    """Returns one sentence for each kind of gap; empty if the record is whole."""
    return (*_lost(history), *_unread(history), *_thinned(history), *_elsewhere(history))


def _lost(history: RunHistory) -> Iterator[str]:
    for each in history.of(LostRecord):
        yield f"worker {each.worker} could not write {counted(each.records, 'record')}: {each.why}"


def _unread(history: RunHistory) -> Iterator[str]:
    if lines := [each.number for each in history.of(UnreadLine)]:
        more = ", ..." if len(lines) > _MOST_NAMED else ""
        which = numbered("line", lines[:_MOST_NAMED])
        yield f"{counted(len(lines), 'line')} of events.jsonl could not be read ({which}{more})"


def _thinned(history: RunHistory) -> Iterator[str]:
    """Yields what was left out: the steps from the first gap to the last, and how many of them are there."""
    if left_out := left_out_steps(history):
        first, last = left_out[0][0], left_out[-1][1]
        num_kept = last - first + 1 - sum(stop - start + 1 for start, stop in left_out)
        but = f", but for {num_kept:,} of them," if num_kept else ""
        yield (
            f"the actions and hashes of steps {first:,} to {last:,}{but} were left out (events_max is "
            f"{history.job.events_max}); the steps near failures and faults are there"
        )


def _elsewhere(history: RunHistory) -> Iterator[str]:
    """Yields that another host coordinates the run, whose folder has the report."""
    if chief := coordinating_host(history):
        host = history.first(HostRecord)
        own = f"host {host.node}" if host is not None and host.node else "one host"
        verb = "coordinates" if history.ended is None else "coordinated"
        yield f"these are the records of {own}; host {chief} {verb} the run, and its run folder has the report"


def left_out_steps(history: RunHistory) -> list[tuple[int, int]]:
    """Returns the steps without actions, as (first, last) in order."""
    return sorted(steps for each in history.of(ThinnedRecord) for steps in each.steps)
