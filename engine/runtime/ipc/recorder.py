"""Writes the records of a run, by every process of it: most as lines of one file, and the actions in files of steps.

Rules: a record is in the kernel's hands before the next action begins, so that the death of the writer loses nothing.
Readers skip the part of a line that a death or a full disk left, and count it. Records of single steps, which are most
of the bytes, go to files that each hold a range of steps. The launcher's recorder leaves out ranges where there is a
limit. On a full disk a worker goes on and counts the records that it lost. The agent raises StorageError: without its
records nothing about the run is proved.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.errors import InvariantError, StorageError
from engine.core.history.process_records import LostRecord
from engine.core.history.record import AGENT, Record, StampedRecord
from engine.core.history.record_lines import encoded
from engine.core.history.run_records import AuditRecord
from engine.core.history.step_files import entry
from engine.files.atomic_write import open_to_append
from engine.files.evidence.chained_append import Chain, chain_of
from engine.runtime.ipc.step_writer import StepWriter
from engine.runtime.ipc.thinning import Thinning

now_ns = time.monotonic_ns  # one clock for all processes of a host


class Recorder:
    """Appends to events.jsonl through a descriptor opened with O_APPEND, and to the files of `steps` if it has them."""

    def __init__(
        self, fd: int, worker: int, steps: StepWriter | None = None, thinning: Thinning | None = None, pid: int = 0
    ):
        """`pid` is that of the process whose records it writes, by default this one."""
        self.fd = fd
        self.worker = worker
        self.steps = steps
        self._thinning = thinning
        self.tell: Callable[[StampedRecord, str], None] | None = None  # is called with each record and its line
        self.last = (-1, "")  # the last action, behind its step
        self._chains: dict[int, Chain] = {}  # by descriptor: of the events, and of the open file of hashes
        self._pid = pid or os.getpid()
        self._lost = LostRecord(records=0, why="")

    def action(self, epoch: int, step: int, action: str, start_ns: int, end_ns: int) -> None:
        """Records one action of this worker, in the epoch that it had accepted, from start to end."""
        if self.steps is None:
            raise InvariantError(f"worker {self.worker} has no file for its action {action}")
        self.last = (step, action)
        self._record(self.steps.append, step, entry(epoch, step, action, start_ns, end_ns))

    def write(self, record: StampedRecord) -> None:
        """Records anything else, stamped with the time of recording unless it has another.

        Raises:
            StorageError: a record of the agent could not be written.
        """
        self._record(self._append, record)

    def hear(self, decision: Record) -> None:
        """Takes a decision of another host, behind which steps may be left out here too."""
        if self._thinning is not None and (thinned := self._thinning.after(decision)):
            self.write(thinned)
            self._thinning.delete()

    def put(self, text: str, step: int | None) -> None:
        """Writes a record that its process has stamped; the hashes of a `step` go to the files of steps.

        Raises:
            StorageError: a record of the agent could not be written.
        """
        self._record(self._put, text, step)

    @property
    def answers(self) -> bool:
        """Whether the disk had answered at the last look."""
        return True

    def look(self) -> bool:
        """Returns whether the disk answers now, where another process writes; raises StorageError if it has not."""
        return True

    def settle(self, *, at_once: bool = False) -> None:
        """Waits until all records are written, with `at_once` a moment only; raises StorageError if one is not."""

    def close(self) -> None:
        """Closes the files of the steps."""
        if self.steps is not None:
            self.steps.close()

    def _record(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            self._lose(error)
        else:
            if self._lost.records:
                self._tell_loss()

    def _append(self, record: StampedRecord) -> None:
        stamped = replace(record, worker=self.worker, pid=self._pid, at_ns=record.at_ns or now_ns())
        text = encoded(stamped)
        self._put(text, record.step if isinstance(record, AuditRecord) else None)
        if self.tell is not None:
            self.tell(stamped, text)
        self.hear(stamped)

    def _put(self, text: str, step: int | None) -> None:
        fd = self.fd if step is None or self.steps is None else self.steps.fd_of(step)
        self._chain(fd).append(fd, text)

    def _chain(self, fd: int) -> Chain:
        """Returns the chain in a file; the next file of hashes is opened before the last one is closed."""
        if fd not in self._chains:
            self._chains = {of: chain for of, chain in self._chains.items() if of == self.fd} | {
                fd: chain_of(fd, self._pid)
            }
        return self._chains[fd]

    def _lose(self, error: OSError) -> None:
        why = error.strerror or str(error)
        if self.worker == AGENT:
            path = os.readlink(f"/proc/self/fd/{self.fd}")
            raise StorageError(f"cannot write {path!r}: {why}") from error
        self._lost = LostRecord(records=self._lost.records + 1, why=why)

    def _tell_loss(self) -> None:
        with contextlib.suppress(OSError):  # then the next record tells it
            self._append(self._lost)
            self._lost = LostRecord(records=0, why="")


def open_events(path: os.PathLike[str] | str) -> int:
    """Opens the events file for appending and returns its descriptor; raises StorageError if it cannot be opened."""
    return open_to_append(Path(path))
