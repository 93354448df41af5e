"""Follows the events of a run that still grow: each look reads only the lines that are new."""

from __future__ import annotations

from pathlib import Path

from engine.core.history.record import Record
from engine.core.history.run_history import RunHistory
from engine.files.events_file import bytes_from, events_of


class GrowingEvents:
    """The events of a run at `path`, which need not exist yet."""

    def __init__(self, path: Path):
        self.path = path
        self._history = RunHistory()
        self._num_bytes = 0  # read so far, always whole lines

    def read_on(self) -> RunHistory:
        """Returns the history of the run, with the lines that were written since the last call.

        Raises:
            StorageError: the file cannot be read, is of another version, or a line is no event.
        """
        for record in self.news():
            self._history.add(record)
        return self._history

    def news(self) -> list[Record]:
        """Returns the records that were written since the last call; raises the errors of `read_on`."""
        if not self.path.exists():
            return []
        read = bytes_from(self.path, self._num_bytes)
        whole = read[: read.rfind(b"\n") + 1]
        records = list(events_of(whole, self.path, self._num_bytes))
        self._num_bytes += len(whole)
        return records
