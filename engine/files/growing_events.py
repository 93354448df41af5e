"""Follows the events of a run that still grow: each look reads only the lines that are new."""

from __future__ import annotations

from pathlib import Path

from engine.core.errors import StorageError
from engine.core.history.run_history import RunHistory
from engine.files.events_file import events_of


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
        try:
            with self.path.open("rb") as file:
                file.seek(self._num_bytes)
                read = file.read()
        except FileNotFoundError:
            return self._history
        except OSError as error:
            raise StorageError(f"{self.path}: {error.strerror}") from error
        whole = read[: read.rfind(b"\n") + 1]
        for record in events_of(whole, self.path, self._num_bytes):
            self._history.add(record)
        self._num_bytes += len(whole)
        return self._history
