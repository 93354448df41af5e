"""Follows the events of a run that still grow: each look reads only the lines that are new."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from engine.core.history.heard_decisions import HeardDecisions
from engine.core.history.record import Record
from engine.core.history.run_history import RunHistory
from engine.files.events_file import events_of, refuse_impossible, whole_lines


class GrowingEvents:
    """The events of a run at `path`, which need not exist yet; they have no actions.

    With `last_commits` a look that finds many commits reads the last ones.
    """

    def __init__(self, path: Path, *, last_commits: bool = False):
        self.path = path
        self._last_commits = last_commits
        self._history, self._heard = RunHistory(), HeardDecisions()
        self._num_bytes = 0  # read so far, always whole lines

    def read_on(self) -> RunHistory:
        """Returns the history of the run, with the lines that were written since the last call.

        Decisions that this host has heard of count as its own.

        Raises:
            StorageError: the file cannot be read, is of another version, or a line is no event.
        """
        known = len(self._history.commits)
        for record in self.news():
            self._history.add(record)
            if (decision := self._heard.told(record)) is not None:
                self._history.add(decision)
        refuse_impossible(self._history, self.path, known)
        return self._history

    def news(self) -> Iterator[Record]:
        """Yields the records that were written since the last call; raises the errors of `read_on`."""
        if not self.path.exists():
            return
        for start, data in whole_lines(self.path, self._num_bytes):
            yield from events_of(data, self.path, start, last_commits=self._last_commits)
            self._num_bytes = start + len(data)
