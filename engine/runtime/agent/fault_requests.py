"""Faults that are requested while a job runs, by files ``request-<hex>.json`` in its run folder.

Rules: the faults of a request and their numbers are bounded. Every field is checked; a request with a wrong field is
refused as a whole. It can only strike workers of this run. A run that is not injectable refuses every request.
`engine/runtime/requests/request_files.py` has the rules of the files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from engine.core.config.job import Job
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
from engine.core.faults.fault_kind import MOST_NS, gpu_problems
from engine.core.history.request_records import RefusedRecord, RequestRecord
from engine.runtime.agent.injector import Injector
from engine.runtime.faults.registry import registered
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.requests.request_files import MAX_BYTES, REQUEST, RequestFiles, json_of, reason_of

CLOSED = "the run was started with --injectable no"
_MOST_FAULTS, _MOST_VICTIMS = 256, 64
_MOST_KNOWN = 4096  # faults of a run
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,99}")


class FaultRequests:
    """The requests in the folder of one run."""

    def __init__(self, folder: Path, job: Job, workers: Collection[int], recorder: Recorder, injectable: bool = True):
        self._files = RequestFiles(folder, REQUEST)
        self._job = job
        self._workers = workers
        self._recorder = recorder
        self._injectable = injectable

    def look(self, injector: Injector) -> None:
        """Answers requests since the last call: a bounded number, and one with faults, which go to every worker."""
        for request in self._files.new():
            faults: tuple[Fault, ...] = ()
            try:
                if not self._injectable:
                    raise ValueError(CLOSED)
                faults = read_request(request.text(), self._job, self._workers, injector.injection.known)
            except FileNotFoundError:
                continue  # it was withdrawn
            except Exception as error:  # of any kind: a file of a user must not end the launcher
                self._recorder.write(RefusedRecord(request=request.name, reason=reason_of(error)))
            else:
                self._recorder.write(RequestRecord(request=request.name, faults=tuple(fault.id for fault in faults)))
                injector.add(faults)
            self._files.remove(request)
            if faults:
                return


def read_request(text: str, job: Job, workers: Collection[int], known: Collection[str]) -> tuple[Fault, ...]:
    """Returns the faults of a request; raises ValueError, or ScheduleError for a wrong action."""
    plain = json_of(text)
    if not isinstance(plain, list):
        raise ValueError("expected a list of faults")
    if not 0 < len(plain) <= _MOST_FAULTS:
        raise ValueError(f"expected 1 to {_MOST_FAULTS} faults, found {len(plain)}")
    if len(known) + len(plain) > _MOST_KNOWN:
        raise ValueError(f"expected at most {_MOST_KNOWN} faults in a run, which has {len(known)}")
    if len(json.dumps(plain)) > MAX_BYTES:  # as it travels to the workers
        raise ValueError(f"it is longer than {MAX_BYTES} bytes in ASCII")
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
        expected = parameters[key].expected if key in parameters else f"one of {', '.join(parameters) or 'none'}"
        if key not in parameters or not parameters[key].fits(value):
            return f"parameter {key!r} of {fault.do}: expected {expected}"
    if not _is_moment(fault.moment, job, ids):
        return "expected a moment of this job, or after another fault"
    if not 0 < len(fault.victims) <= _MOST_VICTIMS or not all(_is_victim(each, job, workers) for each in fault.victims):
        return "expected victims among the workers of this run"
    return next((str(each) for each in gpu_problems(fault.do, fault.parameters, job)), "")


def _is_moment(moment: Moment, job: Job, ids: Collection[str]) -> bool:
    if isinstance(moment, After):
        return moment.fault in ids and moment.phase in (None, *PHASES) and _is_count(moment.delay_ns, MOST_NS + 1)
    slot = (moment.action.pipeline, moment.action.stage)
    return _is_count(moment.step, job.steps) and moment.when in WHENS and _is_slot(*slot, job)


def _is_victim(victim: Victim, job: Job, workers: Collection[int]) -> bool:
    if isinstance(victim, Worker):
        return type(victim.worker) is int and victim.worker in workers
    if isinstance(victim, Owner):
        return _is_slot(victim.pipeline, victim.stage, job)
    return victim.role in ROLES


def _is_slot(pipeline: Any, stage: Any, job: Job) -> bool:
    return _is_count(pipeline, job.pipelines) and _is_count(stage, job.slots)


def _is_count(value: Any, below: int) -> bool:
    return type(value) is int and 0 <= value < below
