"""The launcher's end of its scribe, the process that writes records and result files of a run (`scribe_work.py`).

records         are told without waiting; they are in the kernel's hands, and the scribe completes them also after
the death of the launcher
all else        is asked for, and awaited for `LIMIT_S` at most: folders, result files, the seal
at every tick   one call that waits for the disk as any write does: a run does nothing while it is not answered
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from engine.codec.records import encoded
from engine.core.errors import StorageError
from engine.core.history.process_records import EndedRecord
from engine.core.history.run_records import AGENT, AuditRecord, Record, StampedRecord
from engine.core.history.step_files import span_of
from engine.core.job.job import Job, parse_size
from engine.core.texts import counted
from engine.files.linked_lines import stamped
from engine.files.run_folder import RunFolder
from engine.runtime.agent import orders as away
from engine.runtime.agent.orders import RECORD, Orders
from engine.runtime.process.clock import now_ns
from engine.runtime.process.recorder import Recorder, RecordListener

_PART = 1 << 20  # characters of a file
_SYNC_BYTES_PER_S = 10e6  # of a slow disk, which gets as much more time for a large file


class Scribe(Orders):
    """The scribe of a command, as a context; the main thread begins it before it writes anything."""

    def __enter__(self) -> Scribe:
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(StorageError):
            self.settle()
        self.close()

    def try_place(self, job: Job, is_in_process: bool) -> None:
        """Refuses a place of checkpoints that cannot be written; raises UserError, StorageError without an answer."""
        self.place = job.checkpoints
        self.ask("try", asdict(job), is_in_process)
        self.place = job.results

    def make_run_folder(self, results: str, name: str, say: Callable[[str], None]) -> RunFolder:
        """Makes the folder of a run in `results`, and holds it as used until the end; raises StorageError."""
        self.place = results
        path, notes = self.ask("create", results, name, secrets.token_hex(2), named="the folder of the run")
        for each in notes:
            say(each)
        self.place = path
        return RunFolder(Path(path))

    def recorder(self, events: Path, job: Job, tell: RecordListener | None = None) -> tuple[Recorder, tuple[int, int]]:
        """Opens the files of the records of a run; returns their recorder, which tells of records, and descriptors."""
        limit = parse_size(job.events_max) or 0
        answer = self.question("open", (str(events), span_of(job), limit), "the files of the records")
        events_fd, steps_fd = answer.fds
        return _ScribeRecorder(self, answer.value, tell), (events_fd, steps_fd)

    def add(self, events: Path, *records: StampedRecord) -> None:
        """Appends records of this process to a file of events, with the present time."""
        self.ask("add", str(events), stamped(records), named=counted(len(records), RECORD))

    def end_by_force(self, events: Path, ended: EndedRecord) -> None:
        """Records the end of a process that ends now, if its run has begun, and waits a moment for the disk."""
        if self.why:  # the user knows
            return
        self.tell("add to begun", str(events), stamped([ended]))
        self.settle(at_once=True)

    def write(self, path: Path, text: str) -> None:
        """Replaces a file of the run."""
        for begin in range(0, len(text), _PART):
            self.tell("part", text[begin : begin + _PART], named="")
            self.drain()
        self.ask("write", str(path), named=path.name, limit_s=away.LIMIT_S + len(text) / _SYNC_BYTES_PER_S)

    def make_folder(self, folder: Path, below: Path) -> None:
        """Makes a folder of the run, if it is not there; no part of its path after `below` may be a link."""
        self.ask("make", str(folder), str(below), named=folder.name)

    def await_file(self, path: Path) -> None:
        """Returns when the disk has let a process read a file; raises StorageError if it does not answer."""
        self.ask("read", str(path))

    def seal(self, folder: RunFolder, ended: EndedRecord) -> None:
        """Seals the evidence of a run, and records the end of its command behind it."""
        self.ask("seal", str(folder.path), *stamped([ended]), named="the seal")


class _ScribeRecorder(Recorder):
    """Tells the records of the launcher to its scribe."""

    def __init__(self, scribe: Scribe, number: int, tell: RecordListener | None):
        super().__init__(-1, AGENT, tell=tell)
        self._scribe, self._number = scribe, number

    @property
    def answers(self) -> bool:
        return self._scribe.answers

    def look(self) -> bool:
        return self._scribe.look()

    def settle(self, *, at_once: bool = False) -> None:
        self._scribe.settle(at_once=at_once)

    def hear(self, decision: Record) -> None:
        self._scribe.tell("hear", self._number, encoded(decision), named="")

    def close(self) -> None:
        self._scribe.tell("close", self._number, named="")

    def _append(self, record: StampedRecord) -> None:
        record = replace(record, worker=AGENT, pid=self._pid, at_ns=record.at_ns or now_ns())
        text = encoded(record)
        step = record.step if isinstance(record, AuditRecord) else ""
        self._scribe.send(f"{self._number} {step} {text}\n".encode(), RECORD)  # not quoted again: there are many
        if self._tell is not None:
            self._tell(record, text)
