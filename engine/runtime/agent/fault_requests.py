"""Faults that are requested while a job runs, by files ``request-<hex>.json`` in its run folder.

Rules: a request is read once and removed. It must be a regular file of this user without access for others. Every field
is checked; a request with a wrong field is refused as a whole and recorded. It can only strike workers of this run.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import stat
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from engine.core.config.job import Job
from engine.core.errors import BambooError
from engine.core.faults.fault import (
    PHASES,
    ROLES,
    WHENS,
    After,
    Fault,
    Moment,
    Owner,
    Victim,
    Worker,
    from_plain,
    to_plain,
)
from engine.core.faults.fault_kind import Parameter
from engine.core.history.run_records import RefusedRecord, RequestRecord
from engine.runtime.agent.injector import Injector
from engine.runtime.faults.registry import registered
from engine.runtime.ipc.recorder import Recorder

PATTERN = "request-*.json"
_MAX_BYTES = 65_536
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,99}")


class FaultRequests:
    """The requests in the folder of one run."""

    def __init__(self, folder: Path, job: Job, workers: Collection[int], recorder: Recorder):
        self._folder = folder
        self._job = job
        self._workers = workers
        self._recorder = recorder

    def look(self, injector: Injector) -> None:
        """Handles the requests since the last call."""
        for path in sorted(self._folder.glob(PATTERN)):
            try:
                faults = read_request(_text(path), self._job, self._workers, injector.known)
            except (BambooError, OSError, ValueError) as error:
                self._recorder.write(RefusedRecord(request=path.name, reason=str(error)))
            else:
                self._recorder.write(RequestRecord(request=path.name, faults=tuple(fault.id for fault in faults)))
                injector.add(faults)
            with contextlib.suppress(OSError):
                path.unlink()


def _text(path: Path) -> str:
    """Returns the text of a request; raises ValueError if another user may have written it, or OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, "rb") as file:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid() or facts.st_mode & 0o077:
            raise ValueError("expected a regular file of this user with mode 0600")
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise ValueError(f"it is longer than {_MAX_BYTES} bytes")
    return data.decode()


def read_request(text: str, job: Job, workers: Collection[int], known: Collection[str]) -> tuple[Fault, ...]:
    """Returns the faults of a request; raises ValueError, or ScheduleError for a wrong action."""
    plain = json.loads(text)
    if not isinstance(plain, list):
        raise ValueError("expected a list of faults")
    faults: list[Fault] = []
    names = [str(each.get("id")) for each in plain if isinstance(each, dict)]
    for each in plain:
        try:
            fault = from_plain(each)
            if to_plain(fault) != each:
                raise TypeError("a field is unknown")
        except (AttributeError, KeyError, TypeError, StopIteration) as error:
            raise ValueError(f"expected a fault, found {json.dumps(each)[:200]}") from error
        problem = _problem(fault, job, workers, [*known, *names])
        if problem:
            raise ValueError(f"{fault.id}: {problem}"[:200])
        faults.append(fault)
    return tuple(faults)


def _problem(fault: Fault, job: Job, workers: Collection[int], ids: Sequence[str]) -> str:
    """Returns the first problem of a fault, empty for none."""
    if not isinstance(fault.id, str) or not _ID.fullmatch(fault.id) or ids.count(fault.id) > 1:
        return "expected a unique id of letters, digits and . _ : @ -"
    if not isinstance(fault.do, str) or fault.do not in registered():
        return f"expected one of {', '.join(registered())}, found {fault.do!r}"
    parameters = {each.key: each for each in registered()[fault.do].kind.parameters}
    for key, value in fault.parameters.items():
        if key not in parameters or not _fits(parameters[key], value):
            return f"parameter {key!r} of {fault.do} cannot be {value!r}"
    if not _is_moment(fault.moment, job, ids):
        return "expected a moment of this job, or after another fault"
    if not fault.victims or not all(_is_victim(each, job, workers) for each in fault.victims):
        return "expected victims among the workers of this run"
    return ""


def _is_moment(moment: Moment, job: Job, ids: Collection[str]) -> bool:
    if isinstance(moment, After):
        return moment.fault in ids and moment.phase in (None, *PHASES) and _is_count(moment.delay_ns)
    slot = (moment.action.pipeline, moment.action.stage)
    return _is_count(moment.step, job.steps) and moment.when in WHENS and _is_slot(*slot, job)


def _is_victim(victim: Victim, job: Job, workers: Collection[int]) -> bool:
    if isinstance(victim, Worker):
        return type(victim.worker) is int and victim.worker in workers
    if isinstance(victim, Owner):
        return _is_slot(victim.pipeline, victim.stage, job)
    return victim.role in ROLES


def _is_slot(pipeline: Any, stage: Any, job: Job) -> bool:
    return _is_count(pipeline, job.pipelines) and _is_count(stage, job.stages)


def _is_count(value: Any, below: float = float("inf")) -> bool:
    return type(value) is int and 0 <= value < below


def _fits(parameter: Parameter, value: Any) -> bool:
    """Returns whether a parameter can have this value, in the units of the program."""
    match parameter.form:
        case "duration" | "count":
            return _is_count(value)
        case "number":
            return type(value) in (int, float) and value > 0
        case _:
            return isinstance(value, str) and value in (parameter.choices or (value,))
