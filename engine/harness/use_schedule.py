"""Lets a running job use another schedule: writes a request for its launcher, and waits for the epoch that has it.

Rules: the launcher decides whether the schedule fits. A request is readable only by the user, and is withdrawn if the
launcher has not taken it when the command ends.
"""

from __future__ import annotations

import time
from pathlib import Path

from engine.core.errors import BambooError, ExitCode, NothingMatchedError, Problem, UserError
from engine.core.history.process_records import RefusedRecord
from engine.core.history.run_history import RunHistory, coordinating_host
from engine.core.history.run_records import EpochRecord
from engine.core.protocol.schedule_change import OWN
from engine.files.events_file import GrowingEvents
from engine.files.run_folder import RunFolder
from engine.harness.dead_runs import launcher_runs
from engine.harness.join_run import live_run
from engine.runtime.agent.requests import TOO_LATE, ask, withdraw
from engine.runtime.agent.schedule_requests import BEGINNING
from engine.runtime.process.interrupts import breakable

_POLL_S = 0.1
_HEARD_WITHIN_S = 10.0


def use_schedule(results: Path, run: str, name: str) -> tuple[RunFolder, EpochRecord, int]:
    """Lets a run use a schedule; returns its folder, the epoch that has the schedule, and the first step of it.

    Raises:
        NothingMatchedError: there is no such run, or it has ended, or no step boundary is left.
        UserError: the schedule does not fit the job, or is in use; or another host coordinates the run.
        BambooError: the launcher does not answer.
    """
    folder, history = live_run(results, run, "no step is left for another schedule")
    if chief := coordinating_host(history):
        hint = f"use the run folder of host {chief}"
        raise UserError([Problem("--run", "the run on the host that coordinates it", folder.path.name, hint)])
    growing, seen_history = GrowingEvents(folder.events), RunHistory()
    for record in growing.news():
        seen_history.add(record)
    epoch = max((each.epoch for each in seen_history.of(EpochRecord)), default=0)
    request = ask(folder.path, BEGINNING, {"schedule": name})
    wanted, until_s = "" if name in (OWN, seen_history.job.schedule) else name, time.monotonic() + _HEARD_WITHIN_S
    try:
        while True:
            for record in growing.news():
                seen_history.add(record)
                if isinstance(record, RefusedRecord) and record.request == request.name:
                    raise _refusal(folder, name, record.reason)
                if isinstance(record, EpochRecord) and record.epoch > epoch and record.schedule == wanted:
                    return folder, record, seen_history.committed + 1
            if seen_history.training_ended is not None or not launcher_runs(seen_history, folder.path):
                raise NothingMatchedError(f"{folder.path.name} has ended before it could use schedule {name}")
            if request.exists() and time.monotonic() > until_s:
                raise BambooError(f"{folder.path}: its launcher does not answer", ExitCode.NOT_RECOVERED)
            with breakable():
                time.sleep(_POLL_S)
    finally:
        withdraw(request)


def _refusal(folder: RunFolder, name: str, reason: str) -> BambooError:
    if reason == TOO_LATE:
        return NothingMatchedError(f"{folder.path.name}: {reason}, and no step is left for schedule {name}")
    return UserError([Problem("NAME", "a schedule that the run can use", repr(name), reason)])
