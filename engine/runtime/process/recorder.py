"""Writes the records of a run, in every process of it: most as lines of one file, actions into files of steps.

Rules: a record is handed to the kernel before the next action begins, so the death of the writer loses nothing. Readers
skip and count the partial lines that a death or a full disk leaves. Records of single steps, which are most of the
bytes, go to files that each hold a range of steps. If there is a limit, the launcher's recorder drops ranges. On a full
disk a worker continues and counts its lost records. The agent raises StorageError: without its records, nothing about
the run is proved.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.codec.records import encoded
from engine.core.errors import InvariantError, StorageError
from engine.core.history.process_records import LostRecord, StartedRecord
from engine.core.history.run_records import AGENT, AuditRecord, CommitRecord, Record, StampedRecord, ThinnedRecord
from engine.core.history.step_files import Chore, MarkedSteps, StepFile, as_ranges, chore_entry, entry, superfluous
from engine.files.atomic_write import open_to_append
from engine.files.linked_lines import Chain, chain_of
from engine.runtime.process.clock import now_ns


class LogRetention:
    """Drops ranges of steps from a run that exceeds its limit; `step_files` has the rule.

    The files, of `span` steps each, are in the folder `folder_fd`; together with the events file they may take `limit`
    bytes. The launcher of each host decides at the first commit in each new range. It records the steps that it drops
    before it deletes their files, so no reader finds an unexplained gap.
    """

    def __init__(self, folder_fd: int, events_fd: int, span: int, limit: int):
        self._folder_fd = folder_fd
        self._events_fd = events_fd
        self._writers: set[int | None] = {None}
        self._span = span
        self._limit = limit
        self._marked = MarkedSteps()
        self._num_bytes: dict[int, int] = {}  # range -> bytes, of the complete ranges that still exist
        self._range = 0
        self._superfluous: set[int] = set()

    def after(self, record: Record) -> ThinnedRecord | None:
        """Accepts the next record of the launcher, or a decision of another host.

        Returns the record of the steps to drop now, if there are any.
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
        """Deletes the files of the steps in the last record."""
        for number in self._superfluous:
            del self._num_bytes[number]
            for file in self._files(number):
                with contextlib.suppress(OSError):  # a worker without an action in these steps has no file
                    os.unlink(str(file), dir_fd=self._folder_fd)
        self._superfluous = set()

    def _files(self, number: int) -> list[StepFile]:
        return [StepFile(number * self._span, worker) for worker in self._writers]

    def _size(self, file: StepFile) -> int:
        try:
            return os.stat(str(file), dir_fd=self._folder_fd, follow_symlinks=False).st_size
        except OSError:
            return 0


_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


class StepWriter:
    """Appends to the files of one worker, or of the hashes, in the folder `folder_fd`; each has `span` steps.

    `core.history.step_files` has their format.
    """

    def __init__(self, folder_fd: int, worker: int | None, span: int):
        self._folder_fd = folder_fd
        self._worker = worker
        self._span = span
        self._fd = -1
        self._steps = range(0)  # of the open file
        self._rest = b""  # of an entry that the kernel took in part; no other process appends to the file

    def append(self, step: int, data: bytes) -> None:
        """Writes an entry of a step; raises OSError if it could not be written."""
        if step not in self._steps:
            self._open(step)
        data = self._rest + data
        written = os.write(self._fd, data)
        while written < len(data):
            self._rest = data = data[written:]
            written = os.write(self._fd, data)
        self._rest = b""

    def fd_of(self, step: int) -> int:
        """Returns the descriptor of the file of a step, for lines; raises OSError if it cannot be opened."""
        if step not in self._steps:
            self._open(step)
        return self._fd

    def close(self) -> None:
        """Closes the open file."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd, self._steps = -1, range(0)

    def _open(self, step: int) -> None:
        first = step - step % self._span
        fd = os.open(str(StepFile(first, self._worker)), _FLAGS, 0o600, dir_fd=self._folder_fd)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._steps, self._rest = fd, range(first, first + self._span), b""


def open_steps(path: os.PathLike[str] | str) -> int:
    """Creates the folder of the files and returns its descriptor."""
    os.makedirs(path, mode=0o700, exist_ok=True)
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)


RecordListener = Callable[[StampedRecord, str], None]  # gets a record and its line


class Recorder:
    """Appends to events.jsonl through a descriptor opened with O_APPEND, and to the files of `steps` if it has them."""

    def __init__(
        self,
        fd: int,
        worker: int,
        steps: StepWriter | None = None,
        thinning: LogRetention | None = None,
        pid: int = 0,
        tell: RecordListener | None = None,
        host: str = "",
    ):
        """`pid` is the process whose records it writes, by default this one; `tell` gets each record.

        `host` is that of a worker.
        """
        self.fd = fd
        self.worker = worker
        self.steps = steps
        self.host = host
        self.stage: int | None = None  # of a worker: that of its action
        self._thinning = thinning
        self._tell = tell
        self.last = (-1, "")  # the last action, behind its step
        self._chores, self._chore_step = b"", 0  # since the last action
        self._chains: dict[int, Chain] = {}  # by descriptor: of the events, and of the open file of hashes
        self._pid = pid or os.getpid()
        self._lost = LostRecord(records=0, why="")

    def action(self, epoch: int, step: int, action: str, start_ns: int, end_ns: int) -> None:
        """Records one action of this worker in an epoch, from start to end."""
        if self.steps is None:
            raise InvariantError(f"worker {self.worker} has no file for its action {action}")
        self.last = (step, action)
        chores, self._chores = self._chores, b""
        self._record(self.steps.append, step, chores + entry(epoch, step, action, start_ns, end_ns))

    def chore(self, epoch: int, step: int, chore: Chore, start_ns: int, action: str = "") -> None:
        """Records a chore of this worker from its start until now, for an action if it belongs to one.

        It is written with the next action, for it would else cost as much as one; a death loses it.
        """
        self._chores += chore_entry(epoch, step, chore, start_ns, now_ns(), action)
        self._chore_step = step

    def write(self, record: StampedRecord) -> None:
        """Records anything else, stamped with the current time if it has none.

        Raises StorageError if a record of the agent cannot be written.
        """
        self._record(self._append, record)

    def hear(self, decision: Record) -> None:
        """Accepts a decision of another host, after which steps may be dropped here too."""
        if self._thinning is not None and (thinned := self._thinning.after(decision)):
            self.write(thinned)
            self._thinning.delete()

    def put(self, text: str, step: int | None) -> None:
        """Writes a record that its process has stamped; the hashes of a `step` go to the files of steps.

        Raises StorageError if a record of the agent cannot be written.
        """
        self._record(self._put, text, step)

    @property
    def answers(self) -> bool:
        """Whether the disk answered at the last look."""
        return True

    def look(self) -> bool:
        """Returns whether the disk answers, if another process writes; raises StorageError if a write failed."""
        return True

    def settle(self, *, at_once: bool = False) -> None:
        """Waits until all records are written, `at_once` only for a moment; raises StorageError if a write failed."""

    def close(self) -> None:
        """Closes the files of the steps."""
        if self.steps is not None:
            if self._chores:
                self._record(self.steps.append, self._chore_step, self._chores)
            self.steps.close()

    def _record(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            self._lose(error)
        else:
            if self._lost.records:
                with contextlib.suppress(OSError):  # then the next record reports it
                    self._append(self._lost)
                    self._lost = LostRecord(records=0, why="")

    def _append(self, record: StampedRecord) -> None:
        at_ns = record.at_ns or now_ns()
        stamped = replace(record, worker=self.worker, pid=self._pid, at_ns=at_ns, host=self.host, stage=self.stage)
        text = encoded(stamped)
        self._put(text, record.step if isinstance(record, AuditRecord) else None)
        if self._tell is not None:
            self._tell(stamped, text)
        self.hear(stamped)

    def _put(self, text: str, step: int | None) -> None:
        fd = self.fd if step is None or self.steps is None else self.steps.fd_of(step)
        if fd not in self._chains:  # the next file of hashes is opened before the last one is closed
            self._chains = {of: chain for of, chain in self._chains.items() if of == self.fd}
            self._chains[fd] = chain_of(fd, self._pid)
        self._chains[fd].append(fd, text)

    def _lose(self, error: OSError) -> None:
        why = error.strerror or str(error)
        if self.worker == AGENT:
            path = os.readlink(f"/proc/self/fd/{self.fd}")
            raise StorageError(f"cannot write {path!r}: {why}") from error
        self._lost = LostRecord(records=self._lost.records + 1, why=why)


def open_events(path: os.PathLike[str] | str) -> int:
    """Opens the events file for appending and returns its descriptor; raises StorageError if it cannot be opened."""
    return open_to_append(Path(path))
