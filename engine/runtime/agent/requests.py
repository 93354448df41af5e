"""Requests to a launcher while its job runs, as files in its run folder: of workers that join, leave, or of faults."""

from __future__ import annotations

import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from engine.core.errors import BambooError
from engine.core.history.process_records import RefusedRecord
from engine.core.history.run_records import AddedRecord
from engine.core.job.job import Job
from engine.core.protocol.state import State
from engine.files.atomic_write import closing_fd, write_atomically
from engine.runtime.process.recorder import Recorder

# Requests to a launcher while its job runs: files ``<kind>-<hex>.json`` in its run folder.
#
# Rules: a request is read once, answered by a record, and removed. It must be a regular file of this user without
# access for others. Its size and its depth are bounded, and so is the number of requests of a look. No content of a
# file ends the launcher: its reader catches every error.


MAX_BYTES = 65_536
T = TypeVar("T")
REQUEST = "request-"  # the beginning of the name of a request for faults
_ENDING = ".json"
_MOST_DEEP = 8  # brackets in brackets; a fault has four
_MOST_FILES, _MOST_ANSWERS = 4096, 16  # of a look
_MOST_OF_REASON = 500  # characters
_TEXTS = re.compile(r'"(?:[^"\\]|\\.)*"?')


def ask(run: Path, kind: str, asks: object) -> Path:
    """Writes a request, readable only by the user, into the folder of a run; `kind` is the beginning of its name."""
    path = run / f"{kind}{secrets.token_hex(8)}{_ENDING}"
    write_atomically(path, json.dumps(asks))
    return path


def withdraw(request: Path) -> bool:
    """Withdraws a request; returns False if the launcher was first, which takes only what it can remove itself."""
    try:
        request.unlink()
    except FileNotFoundError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class RequestFile:
    """One request that waits for its answer."""

    path: Path

    @property
    def name(self) -> str:
        """The name of its file, by which its sender knows the answer."""
        return self.path.name

    def text(self) -> str:
        """Returns its text; raises ValueError if another user may have written it, or OSError."""
        with closing_fd(os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)) as fd:
            facts = os.fstat(fd)
            if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
                raise ValueError("expected a regular file of this user with mode 0600")
            data = os.read(fd, MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ValueError(f"it is longer than {MAX_BYTES} bytes")
        return data.decode()


class RequestFiles:
    """The requests of one kind in the folder of one run; `beginning` is that of their names."""

    def __init__(self, folder: Path, beginning: str):
        self._folder, self._beginning = folder, beginning
        self._left_there: set[str] = set()  # the names of answered requests that could not be removed

    def new(self) -> list[RequestFile]:
        """Returns the requests to answer now; those of a folder that cannot be read wait."""
        try:
            with os.scandir(self._folder) as entries:
                names = [each.name for each in islice(entries, _MOST_FILES)]
        except OSError:
            return []
        candidates = (each for each in names if each.startswith(self._beginning) and each.endswith(_ENDING))
        waiting = sorted(each for each in candidates if each not in self._left_there)
        return [RequestFile(self._folder / each) for each in waiting[:_MOST_ANSWERS]]

    def remove(self, request: RequestFile) -> bool:
        """Removes an answered request; one that stays there is not answered again. Returns False if it was gone."""
        for remove in (os.unlink, os.rmdir):  # it may be an empty folder of its name
            try:
                remove(request.path)
            except FileNotFoundError:
                return False
            except OSError:
                continue
            return True
        self._left_there.add(request.name)
        return True

    def accepted(self, read: Callable[[RequestFile], T], recorder: Recorder) -> Iterator[tuple[RequestFile, T]]:
        """Yields the requests to answer now, each as `read` returns it; one that it refuses is recorded and removed."""
        for request in self.new():
            try:
                value = read(request)
            except FileNotFoundError:
                continue  # it was withdrawn
            except Exception as error:  # of any kind: a file of a user must not end the launcher
                if self.remove(request):  # else its sender does not wait for an answer
                    recorder.write(RefusedRecord(request=request.name, reason=reason_of(error)))
                continue
            yield request, value


def reason_of(error: Exception) -> str:
    """Returns why a request is refused, in words."""
    is_told = isinstance(error, (BambooError, OSError, ValueError))
    return (str(error) if is_told else f"it cannot be read ({type(error).__name__})")[:_MOST_OF_REASON]


def json_of(text: str) -> Any:
    """Returns the values of a JSON text; raises ValueError if they are too deep, or for NaN or Infinity."""
    depth = 0
    for character in _TEXTS.sub("", text):
        depth += (character in "[{") - (character in "]}")
        if depth > _MOST_DEEP:
            raise ValueError(f"expected at most {_MOST_DEEP} brackets in brackets")
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"expected a finite number, found {name}")


# Requests for one more worker, or for the notice of one, in the run folder of a running job.
#
#     {"ask": "join", "standby": false}    starts a worker on this host, which waits; answered by its number
#     {"ask": "leave", "worker": 4}        gives a worker its notice, as SIGTERM does
#
# Rules: a run takes workers if it moves slots or has waiting workers, until its last step has begun.
# The rules of the files stand above.

BEGINNING = "join-"
CLOSED = "its stages do not move, and it keeps no worker waiting"
TOO_LATE = "the last step has begun"
_MOST_WORKERS = 4096  # numbers of one run


class WorkerControls(NamedTuple):
    """The means for requests: `start` returns a worker's number, `notify` False if there is no such worker."""

    start: Callable[[bool], int]
    notify: Callable[[int], bool]
    numbers: Collection[int]  # of all workers so far
    is_stopping: bool


class JoinRequests:
    """The requests in the folder of one run."""

    def __init__(self, folder: Path, job: Job, recorder: Recorder):
        self._files = RequestFiles(folder, BEGINNING)
        self._job = job
        self._recorder = recorder

    def look(self, state: State, hands: WorkerControls) -> None:
        """Answers the requests since the last call; starts one worker at most."""
        read = partial(self._carry_out, state, hands)
        for request, added in self._files.accepted(read, self._recorder):
            if added is not None:
                worker, joins = added
                self._recorder.write(AddedRecord(request=request.name, of=worker, joins=joins))
            is_there = self._files.remove(request)
            if added is not None:
                if not is_there:  # withdrawn meanwhile: no command follows the worker
                    hands.notify(added[0])
                return

    def _carry_out(self, state: State, hands: WorkerControls, request: RequestFile) -> tuple[int, bool] | None:
        """Returns the number of the worker that was started, and whether it joins; None for a notice."""
        match json_of(request.text()):
            case {"ask": "join", "standby": bool(is_standby), **rest} if not rest:
                self._check(state, hands)
                return hands.start(not is_standby), not is_standby
            case {"ask": "leave", "worker": int(worker), **rest} if not rest and type(worker) is int:
                if not hands.notify(worker):
                    raise ValueError(f"there is no worker {worker}")
                return None
            case _:
                raise ValueError("expected {'ask': 'join', 'standby': false} or {'ask': 'leave', 'worker': 4}")

    def _check(self, state: State, hands: WorkerControls) -> None:
        if not takes_workers(self._job):
            raise ValueError(CLOSED)
        if hands.is_stopping or state.committed + 1 >= state.last_step:
            raise ValueError(TOO_LATE)
        if len(hands.numbers) >= _MOST_WORKERS:
            raise ValueError(f"a run has at most {_MOST_WORKERS} workers, those that have left included")


def takes_workers(job: Job) -> bool:
    """Returns whether workers can join the run of a job."""
    return job.elastic or job.standby > 0
