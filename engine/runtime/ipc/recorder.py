"""Writes the records of a run, by every process of it: most as lines of one file, and the actions in files of steps.

Rules: a record is in the kernel's hands before the next action begins, so that the death of the writer loses nothing. A
line of which the kernel took only a part is ended there and written again, whole: another process may have appended in
between. Readers skip the part and count it. Records of single steps, which are most of the bytes, go to files that each
hold a range of steps. The launcher's recorder leaves out ranges where there is a limit.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from engine.core.errors import InvariantError
from engine.core.history.record import StampedRecord
from engine.core.history.record_lines import encoded
from engine.core.history.run_records import AuditRecord
from engine.core.history.step_files import entry
from engine.files.atomic_write import open_to_append
from engine.runtime.ipc.step_writer import StepWriter
from engine.runtime.ipc.thinning import Thinning

now_ns = time.monotonic_ns  # one clock for all processes of a host


class Recorder:
    """Appends to events.jsonl through a descriptor opened with O_APPEND, and to the files of `steps` if it has them."""

    def __init__(self, fd: int, worker: int, steps: StepWriter | None = None, thinning: Thinning | None = None):
        self.fd = fd
        self.worker = worker
        self.steps = steps
        self._thinning = thinning
        self._pid = os.getpid()

    def action(self, epoch: int, step: int, action: str, start_ns: int, end_ns: int) -> None:
        """Records one action of this worker, in the epoch that it had accepted, from start to end."""
        if self.steps is None:
            raise InvariantError(f"worker {self.worker} has no file for its action {action}")
        self.steps.append(step, entry(epoch, step, action, start_ns, end_ns))

    def write(self, record: StampedRecord) -> None:
        """Records anything else, stamped with the time of recording unless it has another."""
        stamped = replace(record, worker=self.worker, pid=self._pid, at_ns=record.at_ns or now_ns())
        line = f"{encoded(stamped)}\n".encode()
        if isinstance(record, AuditRecord) and self.steps is not None:
            self.steps.append(record.step, line)
        else:
            append(self.fd, line)
        if self._thinning is not None and (thinned := self._thinning.after(stamped)):
            self.write(thinned)
            self._thinning.delete()


def append(fd: int, line: bytes) -> None:
    """Writes a line, which ends in a newline; raises OSError if it could not be written whole."""
    written = os.write(fd, line)
    while written < len(line):
        if written == len(line) - 1:
            line = b"\n"  # the record is there
        elif written:
            line = b"\n" + line.lstrip(b"\n")
        written = os.write(fd, line)


def open_events(path: os.PathLike[str] | str) -> int:
    """Opens the events file for appending and returns its descriptor; raises StorageError if it cannot be opened."""
    return open_to_append(Path(path))
