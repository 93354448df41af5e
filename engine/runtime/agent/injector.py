"""The injector: the agent's part in fault injection. It drives the machine of `engine/core/faults/injection.py`."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.core.faults import injection
from engine.core.faults.expansion import catch_up_points
from engine.core.faults.fault import (
    MOST_NS,
    PHASES,
    ROLES,
    WHENS,
    After,
    At,
    Fault,
    Moment,
    Owner,
    Role,
    Sign,
    Victim,
    Worker,
    from_plain,
    kind_problems,
    to_plain,
)
from engine.core.faults.injection import (
    InheritedFaults,
    Injection,
    InjectionOutput,
    LookAtVictim,
    MomentReport,
    Moved,
    Now,
    RecordFault,
    SendSignal,
    taken_over,
)
from engine.core.history.process_records import RequestRecord
from engine.core.history.run_records import FaultRecord, UnconfirmedRecord
from engine.core.job.job import Job
from engine.core.protocol.events import RecoveryPhase
from engine.core.protocol.inputs_outputs import Place
from engine.core.protocol.state import State
from engine.runtime.agent.requests import MAX_BYTES, REQUEST, RequestFile, RequestFiles, json_of
from engine.runtime.agent.worker_handles import WorkerHandle, tell_all
from engine.runtime.faults.registry import registered, worker_kinds
from engine.runtime.process.clock import now_ns
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import Recorder


class Injector:
    """Strikes the workers of one run; `state` returns the state of the coordinator."""

    def __init__(
        self,
        job: Job,
        faults: Sequence[Fault],
        members: Mapping[int, WorkerHandle],
        recorder: Recorder,
        board: ProgressBoard | None,
        state: Callable[[], State],
    ):
        self.injection = Injection(job, worker_kinds(), catch_up_points, tuple(faults))
        self._members = members
        self._recorder = recorder
        self._board = board
        self._state = state

    def places(self) -> dict[int, Place]:
        """Returns the last action that each worker has begun."""
        board = self._board
        read = {at: each.child.progress(at, board) for at, each in self._members.items()} if board else {}
        return {worker: Place(at.step, at.action, self.injection.has_struck(worker)) for worker, at in read.items()}

    def look_at_clock(self) -> None:
        """Does the late work that is due."""
        if self.injection.due_ns <= now_ns():
            self._take(injection.do_late_work)

    def add(self, faults: Sequence[Fault]) -> None:
        """Adds faults while the job runs; their ids must be new."""
        self._take(injection.add, tuple(faults))

    def reached(self, phase: RecoveryPhase, epoch: int) -> None:
        """Handles the begin of a phase of the recovery that leads to `epoch`."""
        self._take(injection.reach, phase, epoch)

    def exit_seen(self, worker: int, code: int) -> None:
        """Handles the end of a worker, before the coordinator does."""
        self._take(injection.see_end, worker, code)

    def arm(self) -> None:
        """Handles the begin of the plan of an epoch, before the workers run it."""
        positions = {worker: (at.step, at.action) for worker, at in self.places().items()}
        self._take(injection.arm_merged, positions)

    def strike(self, fault_id: str, report: MomentReport | None = None) -> None:
        """Records a fault and strikes all its victims; does nothing if it has struck before."""
        self._take(injection.strike, fault_id, report)

    def sees(self, worker: int, sign: Sign, value: Any, fault_id: str | None = None) -> None:
        """Handles a sign that a fault has struck a worker; `fault_id` if the worker has named the fault."""
        self._take(injection.see_sign, worker, sign, value, fault_id)

    def go_on(self, before: Injector) -> None:
        """Takes the faults of another injector, whose workers have ended and were started again."""
        self.injection = before.injection
        self._take(injection.restart)

    def take_over(self, inherited: InheritedFaults, lost: str) -> list[str]:
        """Goes on with the faults that host `lost` has struck, or had waiting; returns those that it lost, in words."""
        present = [worker for worker, each in self._members.items() if each.exit_code is None]
        self.injection, outputs = taken_over(self.injection, Now(now_ns(), self._state()), inherited, lost, present)
        for output in outputs:
            self._carry_out(output)
        records = [each.record for each in outputs if isinstance(each, RecordFault)]
        return [str(each) for each in records if isinstance(each, UnconfirmedRecord)]

    def close(self) -> None:
        """Records the unconfirmed faults, each with the missing sign."""
        self._take(injection.close)

    def _take(self, rule: Callable[..., Moved], *arguments: Any) -> None:
        self.injection, outputs = rule(self.injection, Now(now_ns(), self._state()), *arguments)
        for output in outputs:
            self._carry_out(output)

    def _carry_out(self, output: InjectionOutput) -> None:
        if isinstance(output, RecordFault):
            record = output.record
            if isinstance(record, FaultRecord) and record.of in self._members:
                record = replace(record, node=self._members[record.of].host)
            self._recorder.write(record)
        elif isinstance(output, SendSignal):
            self._members[output.worker].child.signal(signal.Signals(output.number))
        elif isinstance(output, LookAtVictim):
            letter = self._members[output.worker].child.state()
            if letter is not None:
                self._take(injection.see_state, output.worker, letter)
        else:
            members = self._members.values() if output.worker is None else [self._members[output.worker]]
            tell_all(members, output.message)


# Faults that are requested while a job runs, by files ``request-<hex>.json`` in its run folder.
#
# Rules: the faults of a request and their numbers are bounded. Every field is checked; a request with a wrong field is
# refused as a whole. It can only strike workers of this run. A run that is not injectable refuses every request.
# `engine/runtime/agent/requests.py` has the rules of the files.

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

        def read(request: RequestFile) -> tuple[Fault, ...]:
            if not self._injectable:
                raise ValueError(CLOSED)
            return read_request(request.text(), self._job, self._workers, injector.injection.known)

        for request, faults in self._files.accepted(read, self._recorder):
            if self._files.remove(request):  # whoever removes it decides: its sender knows that no fault strikes
                self._recorder.write(RequestRecord(request=request.name, faults=tuple(fault.id for fault in faults)))
                injector.add(faults)
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
    names = [str(item.get("id")) for item in plain if isinstance(item, dict)]
    for item in plain:
        try:
            fault = from_plain(item)
            if to_plain(fault) != item:
                raise TypeError("a field is unknown")
        except (AttributeError, KeyError, TypeError, StopIteration) as error:
            raise ValueError(f"expected a fault, found {json.dumps(item)[:200]}") from error
        problem = _problem(fault, job, workers, [*known, *names])
        if problem:
            raise ValueError(f"{fault.id}: {problem}"[:200])
        faults.append(fault)
    return tuple(faults)


def _problem(fault: Fault, job: Job, workers: Collection[int], ids: Sequence[str]) -> str:
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
    return next((str(each) for each in kind_problems(registered()[fault.do].kind, fault.parameters, job)), "")


def _is_moment(moment: Moment, job: Job, ids: Collection[str]) -> bool:
    if isinstance(moment, After):
        return moment.fault in ids and moment.phase in (None, *PHASES) and _is_count(moment.delay_ns, MOST_NS + 1)
    if not isinstance(moment, At):
        return False
    slot = (moment.action.pipeline, moment.action.stage)
    return _is_count(moment.step, job.steps) and moment.when in WHENS and _is_slot(*slot, job)


def _is_victim(victim: Victim, job: Job, workers: Collection[int]) -> bool:
    if isinstance(victim, Worker):
        return type(victim.worker) is int and victim.worker in workers
    if isinstance(victim, Owner):
        return _is_slot(victim.pipeline, victim.stage, job)
    return isinstance(victim, Role) and victim.role in ROLES


def _is_slot(pipeline: Any, stage: Any, job: Job) -> bool:
    return _is_count(pipeline, job.pipelines) and _is_count(stage, job.slots)


def _is_count(value: Any, below: int) -> bool:
    return type(value) is int and 0 <= value < below
