"""Writes events: one JSON object per line, appended whole, by every process of a run to the same file.

Rule: a record is in the kernel's hands before the next action begins, so that the death of the writer loses nothing.
"""

from __future__ import annotations

import json
import os
import time

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
        os.write(self.fd, f'{self._action_of_this}{epoch},"step":{step},"action":"{action}",{times}}}\n'.encode())

    def event(self, event: str, **fields: object) -> None:
        """Records anything else, stamped with the time of recording."""
        record = {"event": event, "worker": self.worker, "pid": self._pid, "at_ns": now_ns(), **fields}
        os.write(self.fd, (json.dumps(record, separators=(",", ":")) + "\n").encode())


def open_events(path: os.PathLike[str] | str) -> int:
    """Opens the events file for appending and returns its descriptor."""
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
