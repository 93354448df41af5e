"""Requests for one more worker, or for the notice of one, in the run folder of a running job.

    {"ask": "join", "standby": false}    starts a worker on this host, which waits; answered by its number
    {"ask": "leave", "worker": 4}        gives a worker its notice, as SIGTERM does

Rules: a run takes workers if it shares out slots anew or has waiting workers, until its last step has begun.
`request_files.py` has the rules of the files.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.config.job import Job
from engine.core.history.elastic_records import AddedRecord
from engine.core.history.request_records import RefusedRecord
from engine.core.membership.state import State
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.requests.request_files import RequestFiles, json_of, reason_of

BEGINNING = "join-"
CLOSED = "the run was started without --elastic and without --standby, so that no worker can join it"
TOO_LATE = "the last step has begun"
_MOST_WORKERS = 4096  # numbers of one run


class Hands(NamedTuple):
    """The means for requests: `start` starts a worker and returns its number, `notify` gives notice.

    `notify` returns False if there is no such worker; `is_stopping` if the run ends already.
    """

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

    def look(self, state: State, hands: Hands) -> None:
        """Answers the requests since the last call; starts one worker at most."""
        for request in self._files.new():
            try:
                added = self._carry_out(json_of(request.text()), state, hands)
            except FileNotFoundError:
                continue  # it was withdrawn
            except Exception as error:  # of any kind: a file of a user must not end the launcher
                self._recorder.write(RefusedRecord(request=request.name, reason=reason_of(error)))
                added = None
            if added is not None:
                worker, joins = added
                self._recorder.write(AddedRecord(request=request.name, of=worker, joins=joins))
            is_there = self._files.remove(request)
            if added is not None:
                if not is_there:  # withdrawn meanwhile: no command follows the worker
                    hands.notify(added[0])
                return

    def _carry_out(self, asked: Any, state: State, hands: Hands) -> tuple[int, bool] | None:
        """Returns the number of the worker that was started, and whether it joins; None for a notice."""
        match asked:
            case {"ask": "join", "standby": bool(is_standby), **rest} if not rest:
                self._check(state, hands)
                return hands.start(not is_standby), not is_standby
            case {"ask": "leave", "worker": int(worker), **rest} if not rest and type(worker) is int:
                if not hands.notify(worker):
                    raise ValueError(f"there is no worker {worker}")
                return None
            case _:
                raise ValueError("expected {'ask': 'join', 'standby': false} or {'ask': 'leave', 'worker': 4}")

    def _check(self, state: State, hands: Hands) -> None:
        if not takes_workers(self._job):
            raise ValueError(CLOSED)
        if hands.is_stopping or state.committed + 1 >= state.last_step:
            raise ValueError(TOO_LATE)
        if len(hands.numbers) >= _MOST_WORKERS:
            raise ValueError(f"a run has at most {_MOST_WORKERS} workers, those that have left included")


def takes_workers(job: Job) -> bool:
    """Returns whether workers can join the run of a job."""
    return (job.elastic or job.standby > 0) and not job.fsdp
