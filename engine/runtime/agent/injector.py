"""The injector: the agent's part in fault injection. It drives the machine of `engine/core/faults/injection.py`."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from engine.core.config.job import Job
from engine.core.coordinator.inputs import Place
from engine.core.faults import injection
from engine.core.faults.catch_up import catch_up_points
from engine.core.faults.fault import Fault, RecoveryPhase
from engine.core.faults.fault_kind import Sign
from engine.core.faults.injection import Moved, Now
from engine.core.faults.injection_state import (
    Injection,
    InjectionOutput,
    LookAtVictim,
    RecordFault,
    SendSignal,
    ToldMoment,
)
from engine.core.faults.taken_faults import ToldFaults, taken_over
from engine.core.history.run_records import ConfirmedRecord, FaultRecord, UnconfirmedRecord
from engine.core.membership.state import State
from engine.runtime.agent.worker_handles import WorkerHandle, tell_all
from engine.runtime.faults.registry import kinds
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns

AnyFaultRecord = FaultRecord | ConfirmedRecord | UnconfirmedRecord


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
        self.injection = Injection(job, kinds(), catch_up_points, tuple(faults))
        self._members = members
        self._recorder = recorder
        self._board = board
        self._state = state

    def places(self) -> dict[int, Place]:
        """Returns the last action that each worker has begun."""
        read = {} if self._board is None else {worker: self._board.read(worker) for worker in self._members}
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

    def strike(self, fault_id: str, told: ToldMoment | None = None) -> None:
        """Records a fault and strikes all its victims; does nothing if it has struck before."""
        self._take(injection.strike, fault_id, told)

    def sees(self, worker: int, sign: Sign, value: Any, fault_id: str | None = None) -> None:
        """Handles a sign that a fault has struck a worker; `fault_id` if the worker has named the fault."""
        self._take(injection.see_sign, worker, sign, value, fault_id)

    def go_on(self, before: Injector) -> None:
        """Takes the faults of another injector, whose workers have ended and were started again."""
        self.injection = before.injection
        self._take(injection.restart)

    def take_over(self, told: ToldFaults, lost: str) -> list[str]:
        """Goes on with the faults that host `lost` has struck, or had waiting; returns those that it lost, in words."""
        present = [worker for worker, each in self._members.items() if each.exit_code is None]
        self.injection, outputs = taken_over(self.injection, Now(now_ns(), self._state()), told, lost, present)
        for output in outputs:
            self._carry_out(output)
        records = [each.record for each in outputs if isinstance(each, RecordFault)]
        return [str(each) for each in records if isinstance(each, UnconfirmedRecord)]

    def close(self) -> None:
        """Records the unconfirmed faults, each with the missing sign."""
        self._take(injection.close)

    def _take(self, rule: Callable[..., Moved], *given: Any) -> None:
        self.injection, outputs = rule(self.injection, Now(now_ns(), self._state()), *given)
        for output in outputs:
            self._carry_out(output)

    def _with_node(self, record: AnyFaultRecord) -> AnyFaultRecord:
        """Returns a record with the host of the victim."""
        if not isinstance(record, FaultRecord) or record.of not in self._members:
            return record
        return replace(record, node=self._members[record.of].host)

    def _carry_out(self, output: InjectionOutput) -> None:
        if isinstance(output, RecordFault):
            self._recorder.write(self._with_node(output.record))
        elif isinstance(output, SendSignal):
            self._members[output.worker].child.signal(signal.Signals(output.number))
        elif isinstance(output, LookAtVictim):
            letter = self._members[output.worker].child.state()
            if letter is not None:
                self._take(injection.see_state, output.worker, letter)
        else:
            members = self._members.values() if output.worker is None else [self._members[output.worker]]
            tell_all(members, output.message)
