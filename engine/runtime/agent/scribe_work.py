"""The scribe of a run: makes its folder, and writes its records and result files, for the launcher (`scribe.py`).

Rules: it decides nothing, and does all in the order in which it is told. It ends when its launcher has, behind the last
word of it. Its launcher may give it up at any time.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from engine.codec.records import decoded, encoded
from engine.core.errors import BY_SIGNAL
from engine.core.history.process_records import EndedRecord, FailedRecord, TrainingEndedRecord
from engine.core.history.run_records import AGENT
from engine.core.history.step_files import FOLDER
from engine.core.job.job import Job
from engine.files.atomic_write import make_folder, open_to_read, storage_errors, write_atomically
from engine.files.events_file import read_history
from engine.files.evidence import seal_of
from engine.files.jobs.checkpoint_place import refuse_unwritable
from engine.files.linked_lines import add_lines, stamped
from engine.files.run_folder import RunFolder, create_run_folder, delete_tree, point_latest_to_newest
from engine.files.trajectory_file import keep_twin, kept_twin, trajectory_rows, trajectory_text
from engine.runtime.agent.orders import ANSWER, GOES_ON, UNASKED, forked, line, threaded, told
from engine.runtime.agent.scribe import Scribe
from engine.runtime.process.locks import folder_used
from engine.runtime.process.recorder import LogRetention, Recorder, StepWriter, open_events, open_steps

_GOES_ON_S = 1.0
Duty = Callable[..., Any]


class _RecordFiles(NamedTuple):
    """The open files of the records of a run, and whether steps may be left out."""

    recorder: Recorder
    fds: list[int]
    thins: bool


@dataclass(slots=True)
class RunWriter:
    """The work for one launcher, whose process is `pid`: its open files by number, and its locks."""

    pid: int
    near: socket.socket
    opened: dict[int, _RecordFiles] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)  # of the next file
    used: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    touched_fd: int = -1
    said_s: float = 0.0
    fds: list[int] = field(default_factory=list)  # that go with the next answer

    def goes_on(self) -> None:
        """Tells the launcher that a long work goes on."""
        if (now_s := time.monotonic()) - self.said_s > _GOES_ON_S:
            self.said_s = now_s
            self.say([GOES_ON, None, None])

    def say(self, words: list[Any]) -> None:
        """Tells the launcher something, unless it is gone."""
        with contextlib.suppress(OSError):
            socket.send_fds(self.near, [line(words)], self.fds)
        self.fds = []


def serve(pid: int, more: Mapping[str, Duty], fd: int) -> None:
    """Does each work that comes through a socket, until its other end is closed; `more` are works beside `WORK`."""
    works = {**WORK, **more}
    with socket.socket(fileno=fd) as near, near.makefile("rb") as lines:
        desk = RunWriter(pid, near)
        with desk.used:
            for text in lines:
                is_asked, value, error = False, None, None
                try:
                    if text.startswith(b"["):
                        name, is_asked, *arguments = json.loads(text)
                        value = works[name](desk, *arguments)
                    else:
                        _record(desk, *text.decode().rstrip("\n").split(" ", 2))
                except Exception as exception:  # the launcher hears of it
                    error = told(exception)
                if is_asked or error is not None:
                    desk.say([ANSWER if is_asked else UNASKED, value, error])


def _create(desk: RunWriter, results: str, name: str, hex4: str) -> tuple[str, list[str]]:
    notes: list[str] = []
    folder = create_run_folder(Path(results), name, datetime.now(), hex4, notes.append)
    _use(desk, str(folder.path))
    return str(folder.path), notes


def _use(desk: RunWriter, folder: str) -> None:
    desk.used.enter_context(folder_used(Path(folder)))
    desk.touched_fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    desk.used.callback(os.close, desk.touched_fd)


def _open(desk: RunWriter, events: str, span: int, limit: int) -> int:
    """Opens the files of the records, whose descriptors go with the answer; returns their number."""
    path = Path(events)
    events_fd = open_events(path)
    with storage_errors("make", path.parent / FOLDER):
        steps_fd = open_steps(path.parent / FOLDER)
    thinning = LogRetention(steps_fd, events_fd, span, limit) if limit else None
    recorder = Recorder(events_fd, AGENT, StepWriter(steps_fd, None, span), thinning, desk.pid)
    desk.opened[events_fd] = _RecordFiles(recorder, [events_fd, steps_fd], bool(limit))
    desk.fds = [events_fd, steps_fd]
    return events_fd


def _close(desk: RunWriter, number: int) -> None:
    if (opened := desk.opened.pop(number, None)) is not None:
        opened.recorder.close()
        for fd in opened.fds:
            os.close(fd)


def _record(desk: RunWriter, number: str, step: str, text: str) -> None:
    desk.opened[int(number)].recorder.put(text, int(step) if step else None)
    if desk.opened[int(number)].thins:
        _hear(desk, int(number), text)


def _hear(desk: RunWriter, number: int, text: str) -> None:
    if desk.opened[number].thins:
        desk.opened[number].recorder.hear(decoded(text))


def _touch(desk: RunWriter) -> None:
    """Changes nothing, by a call that waits for the disk as any write does."""
    if desk.touched_fd >= 0:
        os.fchmod(desk.touched_fd, stat.S_IMODE(os.stat(desk.touched_fd).st_mode))


def _write(desk: RunWriter, path: str) -> None:
    text, desk.parts = "".join(desk.parts), []
    write_atomically(Path(path), text)


def _make(desk: RunWriter, folder: str, below: str) -> None:
    make_folder(Path(folder), Path(below))
    for part in (Path(folder), *Path(folder).parents):
        if part == Path(below):
            break
        part.chmod(0o700)


def _read(desk: RunWriter, path: str) -> None:
    """Reads the beginning of a file, which waits as long as any reader would."""
    with contextlib.suppress(OSError), open(open_to_read(Path(path)), "rb") as file:
        file.read(1)


def _seal(desk: RunWriter, folder: str, ended: str) -> None:
    seal = replace(seal_of(Path(folder), desk.goes_on), worker=AGENT, pid=desk.pid, at_ns=time.monotonic_ns())
    add_lines(RunFolder(Path(folder)).events, [encoded(seal), ended], desk.pid)


def _fail(desk: RunWriter, run: str, text: str, code: int) -> None:
    """Records the error that has ended a command, unless the run has an end; deletes a folder without any record."""
    folder = RunFolder(Path(run))
    if not folder.events.exists():
        delete_tree(folder.path, folder.path.parent)
        point_latest_to_newest(folder.path.parent)
        return
    history = read_history(folder.events)
    outcome = "interrupted" if code in BY_SIGNAL else "failed"
    failed = [] if history.error else [FailedRecord(error=text)]
    training = [] if history.training_ended else [TrainingEndedRecord(outcome=outcome, exit_code=code)]
    if not history.is_empty and history.ended is None:
        records = (*failed, *training, EndedRecord(outcome=outcome, exit_code=code))
        add_lines(folder.events, stamped(records, desk.pid), desk.pid)


def _kept_twin(desk: RunWriter, results: str, fingerprint: str) -> str | None:
    rows = kept_twin(Path(results), fingerprint)
    return None if rows is None else trajectory_text(rows)


def _keep_twin(desk: RunWriter, results: str, fingerprint: str, path: str) -> None:
    """Keeps a twin whose rows are those in the file at `path`."""
    with open(open_to_read(Path(path)), encoding="utf-8") as file:
        keep_twin(Path(results), fingerprint, trajectory_rows(file.read(), Path(path)))


def _add(desk: RunWriter, events: str, texts: list[str]) -> None:
    add_lines(Path(events), texts, desk.pid)


WORK: Mapping[str, Duty] = {
    "create": _create,
    "open": _open,
    "hear": _hear,
    "close": _close,
    "add": _add,
    "add to begun": lambda desk, events, texts: _add(desk, events, texts) if Path(events).exists() else None,
    "part": lambda desk, text: desk.parts.append(text),
    "write": _write,
    "make": _make,
    "read": _read,
    "touch": _touch,
    "seal": _seal,
    "fail": _fail,
    "kept twin": _kept_twin,
    "keep twin": _keep_twin,
    "try": lambda desk, job, in_process: refuse_unwritable(Job(**job), in_process),
}


@contextlib.contextmanager
def scribe_for(is_in_process: bool, more: Mapping[str, Duty] = {}) -> Iterator[Scribe]:
    """Runs a scribe beside the block; of a run in one process it is a thread."""
    work: Callable[[int], object] = partial(serve, os.getpid(), more)
    with Scribe(threaded("scribe", work) if is_in_process else forked("bamboo-scribe", work)) as scribe:
        yield scribe
