"""The parts of a run's record that a reader does not have, in sentences for reports and the status."""

from __future__ import annotations

from engine.core.history.record import UnreadLine
from engine.core.history.run_history import RunHistory
from engine.core.texts import counted, numbered

_MOST_NAMED = 5


def gaps(history: RunHistory) -> tuple[str, ...]:
    """Returns one sentence for each kind of gap; empty if the record is whole."""
    lines = [each.number for each in history.of(UnreadLine)]
    if not lines:
        return ()
    more = ", ..." if len(lines) > _MOST_NAMED else ""
    which = numbered("line", lines[:_MOST_NAMED])
    return (f"{counted(len(lines), 'line')} of events.jsonl could not be read ({which}{more})",)
