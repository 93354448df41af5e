"""Leaves out ranges of steps from the files of a run that grows beyond its limit; `retention` has the rule.

Rules: the launcher decides, at the first commit in each new range; of several hosts each one for its own files. It
records which steps it leaves out before it deletes their files, so that no reader finds a gap without its reason.
"""

from __future__ import annotations

import contextlib
import os

from engine.core.history.process_records import StartedRecord
from engine.core.history.record import Record
from engine.core.history.retention import MarkedSteps, as_ranges, superfluous
from engine.core.history.run_records import CommitRecord, ThinnedRecord
from engine.core.history.step_files import StepFile


class Thinning:
    """The files of a run's workers, of `span` steps each, in the folder of `folder_fd`.

    With the events file they may take `limit` bytes.
    """

    def __init__(self, folder_fd: int, events_fd: int, span: int, limit: int):
        self._folder_fd = folder_fd
        self._events_fd = events_fd
        self._writers: set[int | None] = {None}
        self._span = span
        self._limit = limit
        self._marked = MarkedSteps()
        self._num_bytes: dict[int, int] = {}  # range -> bytes, of the ranges that are complete and there
        self._range = 0
        self._superfluous: set[int] = set()

    def after(self, record: Record) -> ThinnedRecord | None:
        """Takes the next record of the launcher, or a decision that it has heard.

        Returns the record of the steps to leave out now, if there are any.
        """
        self._marked.add(record)
        if isinstance(record, StartedRecord):
            self._writers.add(record.of)
        if not isinstance(record, CommitRecord) or record.step // self._span <= self._range:
            return None
        for number in range(self._range, record.step // self._span):
            self._num_bytes[number] = sum(map(self._size, self._files(number)))
        self._range = record.step // self._span
        marked = {step // self._span for step in self._marked.steps}
        left = self._limit - os.fstat(self._events_fd).st_size
        self._superfluous = superfluous(self._num_bytes, marked, left)
        return ThinnedRecord(steps=as_ranges(self._superfluous, self._span)) if self._superfluous else None

    def delete(self) -> None:
        """Deletes the files of the steps of the last record."""
        for number in self._superfluous:
            del self._num_bytes[number]
            for each in self._files(number):
                with contextlib.suppress(OSError):  # a worker without an action in these steps has no file
                    os.unlink(str(each), dir_fd=self._folder_fd)
        self._superfluous = set()

    def _files(self, number: int) -> list[StepFile]:
        return [StepFile(number * self._span, worker) for worker in self._writers]

    def _size(self, file: StepFile) -> int:
        try:
            return os.stat(str(file), dir_fd=self._folder_fd, follow_symlinks=False).st_size
        except OSError:
            return 0
