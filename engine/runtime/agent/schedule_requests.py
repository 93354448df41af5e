"""Requests for another schedule, in the run folder of a running job: `schedule-<hex>.json` with {"schedule": "zbv"}.

Rules: the run uses it from the next step boundary on, and the record of that epoch is the answer. The rules of the
files stand in `requests.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.core.history.process_records import RefusedRecord
from engine.core.job.job import Job
from engine.core.protocol.events import WantedSchedule
from engine.core.protocol.schedule_change import change_of
from engine.core.protocol.state import State
from engine.runtime.agent.requests import TOO_LATE, RequestFiles, json_of, reason_of
from engine.runtime.process.clock import now_ns
from engine.runtime.process.recorder import Recorder

BEGINNING = "schedule-"  # of the name of a request


class ScheduleRequests:
    """The requests in the folder of one run."""

    def __init__(self, folder: Path, job: Job, recorder: Recorder):
        self._files, self._job, self._recorder = RequestFiles(folder, BEGINNING), job, recorder

    def look(self, state: State, decide: Callable[[WantedSchedule], object]) -> None:
        """Answers one request, if there is one since the last call."""
        for request in self._files.new()[:1]:
            try:
                change = self._wanted(json_of(request.text()), state)
            except FileNotFoundError:
                continue  # it was withdrawn
            except Exception as error:  # of any kind: a file of a user must not end the launcher
                self._recorder.write(RefusedRecord(request=request.name, reason=reason_of(error)))
                self._files.remove(request)
                continue
            if self._files.remove(request):
                decide(change)

    def _wanted(self, request: Any, state: State) -> WantedSchedule:
        match request:
            case {"schedule": str(name), **rest} if not rest:
                if state.committed + 1 >= state.last_step:
                    raise ValueError(TOO_LATE)
                schedule, owners = change_of(self._job, state, name)
                return WantedSchedule(now_ns(), schedule, "asked for by the user", owners)
            case _:
                raise ValueError("expected {'schedule': 'zbv'}")
