"""Recoveries for the live display: the owners of slots before and after, and the time taken.

Rules: only the size of the events file is noted until a worker is gone. Then the file is read from a little earlier, in
a thread: with many workers that takes longer than the launcher may be deaf to the next death.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Executor, Future
from pathlib import Path

from engine.core.checks.recoveries import USUAL, Recovery, RecoveryLog
from engine.core.errors import StorageError
from engine.core.history.run_history import RunHistory
from engine.core.job.job import Job
from engine.core.ownership import Slot
from engine.files.events_file import read_events
from engine.runtime.agent.run_state import RunView

GONE = ("dead", "failed", "left")
_MAX_LOOKS = 8  # reads of the events for one expected recovery, which may not happen


class LiveRecoveries:
    """Follows the views of one run, whose events go to `events`; they are read in `readers`."""

    def __init__(self, job: Job, events: Path, readers: Executor):
        self.owners: dict[Slot, int] = {}  # after the last recovery or hand-over
        self._job = job
        self._events = events
        self._readers = readers
        self._reading: Future[tuple[list[Recovery], RecoveryLog]] | None = None
        # The last few (steps committed, size of the file, owners); the stall is relative to the usual steps before.
        self._marks: deque[tuple[int, int, dict[Slot, int]]] = deque()
        self._slots: dict[int, tuple[Slot, ...]] = {}  # of each worker, while it ran
        self._known_gone: set[int] = set()
        self._looks_left = 0
        self._looked_at = 0  # steps committed
        self._reported = 0  # the epoch of the last reported recovery

    def slots(self, worker: int) -> tuple[Slot, ...]:
        """Returns the slots that a worker owns or last owned."""
        return self._slots.get(worker, ())

    def look(self, view: RunView) -> list[str]:
        """Accepts the next view; returns one line for each recovery that has been read since the last one."""
        lines = self.lines()
        self.owners = self.owners or {slot: one.worker for one in view.workers for slot in one.slots}
        num_steps = view.run_state.committed + 1
        gone = {one.worker for one in view.workers if one.state in GONE}
        for worker in {one.worker for one in view.workers} - gone:
            self._slots[worker] = tuple(slot for slot, owner in self.owners.items() if owner == worker)
        if gone - self._known_gone and num_steps < self._job.steps:
            self._looks_left, self._looked_at = _MAX_LOOKS, num_steps
        elif not self._looks_left:
            # A worker that is out, but not yet gone, still shows its slots.
            owned = [(slot, one.worker) for one in view.workers if one.worker not in gone for slot in one.slots]
            if len(owned) == len(self.owners) == len(dict(owned)):
                self.owners = dict(owned)
        self._known_gone |= gone
        if self._looks_left and num_steps > self._looked_at and self._reading is None:
            self._looks_left, self._looked_at = self._looks_left - 1, num_steps
            # A mark before the first commit may be before the first epoch, which is not a recovery: read everything.
            mark = self._marks[0] if self._marks else (0, 0, {})
            self._reading = self._readers.submit(_read, self._job, self._events, *mark)
        if not self._looks_left:
            self._note(num_steps)
        return lines + self.lines()

    def lines(self, *, is_last: bool = False) -> list[str]:
        """Returns the lines of a read that is over; waits for one that is not, if it `is_last`."""
        if self._reading is None or not (is_last or self._reading.done()):
            return []
        reading, self._reading = self._reading, None
        try:
            recoveries, log = reading.result()
        except StorageError:
            return []  # a run must not end because of its display
        recoveries = [each for each in recoveries if each.epoch > self._reported]
        if recoveries and not log.epochs:
            self._looks_left, self._reported = 0, recoveries[-1].epoch
            self.owners = log.history.owners
        return [str(recovery) for recovery in recoveries] if not self._looks_left else []

    def _note(self, num_steps: int) -> None:
        """Keeps a mark before the open step; a worker may be a step ahead of the agent's run state."""
        size = self._events.stat().st_size if self._events.exists() else 0
        self._marks.append((num_steps, size, self.owners))
        while len(self._marks) > 1 and self._marks[1][0] <= num_steps - USUAL - 2:
            self._marks.popleft()


def _read(
    job: Job, events: Path, num_steps: int, start: int, owners: dict[Slot, int]
) -> tuple[list[Recovery], RecoveryLog]:
    """Returns the recoveries from the byte `start` of the events on, of which `num_steps` steps come before."""
    log = RecoveryLog(RunHistory(job, True, owners) if num_steps else RunHistory())
    read = read_events(events, start if num_steps else 0, max(0, num_steps - 1))
    return [one for record in read for one in log.read(record)], log
