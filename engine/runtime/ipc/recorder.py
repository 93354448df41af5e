"""Writes the records of a run: one JSON object per line, appended whole, by every process of a run to the same file.

Rules: a record is in the kernel's hands before the next action begins, so that the death of the writer loses nothing. A
line of which the kernel took only a part is ended there and written again, whole: another process may have appended in
between. Readers skip the part and count it.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

from engine.core.history.record import StampedRecord
from engine.core.history.record_lines import encoded
from engine.files.atomic_write import open_to_append

now_ns = time.monotonic_ns  # one clock for all processes of a host


class Recorder:
    """Appends to events.jsonl through a descriptor opened with O_APPEND."""

    def __init__(self, fd: int, worker: int):
        self.fd = fd
        self.worker = worker
        self._pid = os.getpid()
        self._action_of_this = f'{{"event":"action","worker":{worker},"pid":{self._pid},"epoch":'

    def action(self, epoch: int, step: int, action: str, start_ns: int, end_ns: int) -> None:
        """Records one action of this worker, in the epoch that it had accepted, from start to end."""
        times = f'"start_ns":{start_ns},"end_ns":{end_ns}'
        append(self.fd, f'{self._action_of_this}{epoch},"step":{step},"action":"{action}",{times}}}\n'.encode())

    def write(self, record: StampedRecord) -> None:
        """Records anything else, stamped with the time of recording unless it has another."""
        stamped = replace(record, worker=self.worker, pid=self._pid, at_ns=record.at_ns or now_ns())
        append(self.fd, f"{encoded(stamped)}\n".encode())


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
