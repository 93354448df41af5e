"""Requests for another schedule, in the run folder of a running job: `schedule-<hex>.json` with {"schedule": "zbv"}.

Rules: the run uses it from the next step boundary on, and the record of that epoch is the answer. The rules of the
files stand in `requests.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path

from engine.core.job.job import Job
from engine.core.protocol.events import WantedSchedule
from engine.core.protocol.schedule_change import change_of
from engine.core.protocol.state import State
from engine.runtime.agent.requests import TOO_LATE, RequestFile, RequestFiles, json_of
from engine.runtime.process.clock import now_ns
from engine.runtime.process.recorder import Recorder

BEGINNING = "schedule-"  # of the name of a request


class ScheduleRequests:
    """The requests in the folder of one run."""

    def __init__(self, folder: Path, job: Job, recorder: Recorder):
        self._files, self._job, self._recorder = RequestFiles(folder, BEGINNING), job, recorder

    def look(self, state: State, decide: Callable[[WantedSchedule], object]) -> None:
        """Answers one request, if there is one since the last call."""
        for request, change in islice(self._files.accepted(partial(self._wanted, state), self._recorder), 1):
            if self._files.remove(request):
                decide(change)

    def _wanted(self, state: State, request: RequestFile) -> WantedSchedule:
        match json_of(request.text()):
            case {"schedule": str(name), **rest} if not rest:
                if state.committed + 1 >= state.last_step:
                    raise ValueError(TOO_LATE)
                schedule, owners = change_of(self._job, state, name)
                return WantedSchedule(now_ns(), schedule, "asked for by the user", owners)
            case _:
                raise ValueError("expected {'schedule': 'zbv'}")
