"""The planner thread of a worker: it computes plans of coming epochs, and the next program, before they are needed.

Rules: the thread reads no value that training changes, and it changes only the prepared plans; the same computation in
the main thread would give the same result. It does one task after the other. The planner threads of a host take turns:
all together they would take the cores from the workers that the others wait for. The wait for a turn is short, and
after it the thread computes without the lock.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

from engine.core.action import Action, Program
from engine.core.errors import required
from engine.core.history.run_records import PreparedRecord
from engine.core.ownership import Grid, Ownership, Slot, healed
from engine.core.program.build import build_program
from engine.core.recovery.plan import EpochPlan
from engine.core.recovery.plan_messages import PrepareMessage
from engine.core.worker.epoch_plan import plan_epoch
from engine.core.worker.inputs import PlanPrepared
from engine.core.worker.outputs import PlanNextStep
from engine.runtime.ipc.control import Control
from engine.runtime.process.host_lock import HostLock
from engine.runtime.transport.worker_program import WorkerProgram, worker_program
from engine.runtime.worker.worker_context import WorkerContext
from engine.runtime.worker.worker_protocol import WorkerProtocol

_MOST_S = 60.0  # to wait for a task that began one step ago
_CHOOSY_LOOKS = 10  # of a millisecond each
_SWITCH_S = 0.0002  # after this time the planner thread returns the interpreter to the main thread


class NextStep(NamedTuple):
    """The step after a step of a recovery: it has all shadows, and HEALs if some of them are new."""

    ownership: Ownership
    is_healing: bool
    worker_program: WorkerProgram


class PlannerThread:
    """The plans and programs that one worker computes in advance."""

    def __init__(self, context: WorkerContext, protocol: WorkerProtocol, grid: Grid):
        self._context = context
        self._protocol = protocol
        self._grid = grid
        self._thread = ThreadPoolExecutor(1)
        self._hurry = threading.Event()
        self._host_lock = HostLock(context.board.fd)
        sys.setswitchinterval(_SWITCH_S)
        self._next_step: Future[NextStep] | None = None
        self._prepared: list[tuple[EpochPlan, WorkerProgram]] = []
        protocol.prepare = self._on_prepare

    def worker_program(self, plan: EpochPlan) -> WorkerProgram:
        """Returns this worker's part of the program of a plan, at once if it is prepared."""
        prepared = next((program for each, program in self._prepared if each is plan), None)
        if prepared is not None:
            return prepared
        return self._part(plan.plan.program, plan.ownership)

    def default_program(
        self, ownership: Ownership, healing: frozenset[tuple[int, Slot]] = frozenset()
    ) -> WorkerProgram:
        """Returns this worker's part of a whole step; `healing` has the new shadow and the slot of each HEAL."""
        job = self._context.job
        program = build_program(job.schedule, ownership, job.redundancy, healing, job.log_every)
        return self._part(program, ownership)

    def usual_actions(self, ownership: Ownership) -> tuple[Action, ...]:
        """Returns the actions of this worker in a whole step."""
        return tuple(action for action, _ in self.default_program(ownership).actions)

    def _part(self, program: Program, ownership: Ownership) -> WorkerProgram:
        context, has_tags = self._context, self._context.job.backend != "nccl"
        return worker_program(context.worker, program, ownership, context.borders, has_tags=has_tags)

    def _on_prepare(self, told: PrepareMessage) -> None:
        self._thread.submit(self._prepare, told).add_done_callback(_log_error)

    def _turn_in(self, step: int) -> contextlib.AbstractContextManager[bool]:
        return self._host_lock.acquire_when(well_inside(self._context.control, step), self._hurry)

    def _prepare(self, told: PrepareMessage) -> None:
        context = self._context
        with self._turn_in(told.plan.committed):  # the step whose commit begins the epoch
            plan = plan_epoch(self._grid, told.plan)
            if plan.plan.lost_stages:
                return
            self._prepared.append((plan, self.worker_program(plan)))
            context.recorder.write(PreparedRecord(epoch=told.plan.epoch))
            self._protocol.feed_aside(PlanPrepared(told.number, plan))
            kept = self._protocol.state.prepared
            self._prepared = [each for each in self._prepared if any(each[0] is other for other in kept)]

    def plan_next_step(self, given: PlanNextStep) -> None:
        """Starts to plan the step after the one that is about to begin."""
        before = given.ownership

        def plan() -> NextStep:
            with self._turn_in(given.step):
                ownership = healed(
                    before,
                    self._context.job.redundancy,
                    self._context.job.redundancy_level,
                    given.members,
                    given.leaving,
                    given.wanted,
                    given.hosts,
                )
                new = frozenset(
                    (worker, slot)
                    for slot in before.grid.slots()
                    for worker in ownership.shadows_of(*slot)
                    if worker not in before.shadows_of(*slot)
                )
                return NextStep(ownership, bool(new), self.default_program(ownership, new))

        self._next_step = self._thread.submit(plan)

    def next_step(self) -> NextStep:
        """Waits for the plan of the last `plan_next_step` and returns it."""
        next_step = required(self._next_step, "the next step is being planned")
        self._hurry.set()
        try:
            return next_step.result(_MOST_S)
        finally:
            self._hurry.clear()


def well_inside(control: Control, step: int) -> Callable[[], bool]:
    """Returns a function to be called each millisecond: whether training is inside a long action of `step` or later.

    An action is long if two calls find it. Training needs the interpreter most at the beginning of an action. If all
    actions are short, any action will do after `_CHOOSY_LOOKS` calls.
    """
    before: object = None
    looks = count()

    def look() -> bool:
        nonlocal before
        at = control.at
        at_step, _, is_inside = at
        is_still, before = at == before or next(looks) >= _CHOOSY_LOOKS, at
        return is_inside and is_still and at_step >= step

    return look


def _log_error(done: Future[None]) -> None:
    """Writes an error to the worker's log. The epoch then gathers inventories; the result is the same."""
    if (error := done.exception()) is not None:
        traceback.print_exception(error)
