"""What a worker works out in a thread beside training, before it is needed: plans of coming epochs, the next program.

Rules: that thread reads nothing that changes while training goes on, and changes nothing but what is prepared; so it
is as if the same had been worked out later. It takes one order after the other; of an epoch, the latest plan counts.
Workers take turns: all at once they would take every core from those whom the others wait for. Nobody waits long.
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

from engine.core.config.job_wants import shadowed
from engine.core.errors import InvariantError
from engine.core.history.run_records import PreparedRecord
from engine.core.messages import EpochMessage, PreparedMessage, PrepareMessage
from engine.core.messages import PlanMessage as Document
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.build import build_program
from engine.core.recovery.inventory import from_json
from engine.core.recovery.planner import Plan, PlanInput, make_plan
from engine.runtime.ipc.control import Control
from engine.runtime.process.host_lock import HostLock
from engine.runtime.transport.worker_program import WorkerProgram, worker_program
from engine.runtime.worker.worker_context import WorkerContext

_MOST_S = 60.0  # for what was begun a step ago
_CHOOSY_LOOKS = 10  # of a millisecond each
_SWITCH_S = 0.0002  # after which the thread beside training hands the interpreter back


class PreparedPlan(NamedTuple):
    """The document of an epoch, and what comes of it."""

    told: Document
    ownership: Ownership
    plan: Plan


class NextStep(NamedTuple):
    """The step that follows on one of a recovery: with the shadows that are wanted, of which some may be new."""

    ownership: Ownership
    is_healing: bool
    worker_program: WorkerProgram


class PlannerThread:
    """What one worker knows before it is needed."""

    def __init__(self, context: WorkerContext, grid: Grid):
        self._context = context
        self._grid = grid
        self._thread = ThreadPoolExecutor(1)
        self._hurry = threading.Event()
        self._host_lock = HostLock(context.board.fd)
        sys.setswitchinterval(_SWITCH_S)
        self._next_step: Future[NextStep] | None = None
        self._prepared: dict[int, tuple[PreparedPlan, WorkerProgram]] = {}  # by epoch
        context.control.on_prepare = self._on_prepare

    def plan(self, told: Document) -> PreparedPlan:
        """Returns the plan that a document makes."""
        ownership = Ownership(self._grid, told.owners, told.shadows)
        inventories = tuple(from_json(text) for _, text in told.inventories)
        return PreparedPlan(told, ownership, make_plan(PlanInput(told.epoch, told.committed, ownership, inventories)))

    def worker_program(self, planned: PreparedPlan) -> WorkerProgram:
        """Returns what this worker has to do in a plan."""
        return worker_program(self._context.worker, planned.plan.program, planned.ownership, self._context.borders)

    def default_program(
        self, ownership: Ownership, healing: frozenset[tuple[int, Slot]] = frozenset()
    ) -> WorkerProgram:
        """Returns what this worker has to do in a step with nothing to make up for but shadows that are new."""
        job, context = self._context.job, self._context
        program = build_program(job.schedule, ownership, job.redundancy, healing, job.log_every, job.fsdp)
        return worker_program(context.worker, program, ownership, context.borders)

    def _on_prepare(self, told: PrepareMessage) -> None:
        self._thread.submit(self._prepare, told).add_done_callback(_say_what_failed)

    def _prepare(self, told: PrepareMessage) -> None:
        with self._locked_in(told.plan.committed):  # with which the epoch begins
            self._make_ready(told)

    def _locked_in(self, step: int) -> contextlib.AbstractContextManager[bool]:
        return self._host_lock.acquire_when(well_inside(self._context.control, step), self._hurry)

    def _make_ready(self, told: PrepareMessage) -> None:
        planned = self.plan(told.plan)
        if not planned.plan.lost_stages and self._context.shards is None:  # shards are no replicas
            epoch = told.plan.epoch
            # The one before may have begun, and training not have come to it yet.
            kept = {each: prepared for each, prepared in self._prepared.items() if each == epoch - 1}
            self._prepared = {**kept, epoch: (planned, self.worker_program(planned))}
            self._context.recorder.write(PreparedRecord(epoch=epoch))
            self._context.control.send(PreparedMessage(told.number, planned.plan.digest))

    def take_prepared(self, epoch: EpochMessage) -> tuple[PreparedPlan, WorkerProgram]:
        """Returns what has been prepared for an epoch; raises InvariantError when that is something else."""
        prepared = self._prepared.get(epoch.epoch)
        found = None if prepared is None else prepared[0].plan.digest
        if prepared is None or found != epoch.digest:
            who = f"worker {self._context.worker} has prepared {found} for epoch {epoch.epoch}"
            raise InvariantError(f"{who}, which is said to be {epoch.digest}")
        return prepared

    def plan_next_step(
        self, step: int, ownership: Ownership, members: tuple[int, ...], leaving: tuple[int, ...]
    ) -> None:
        """Begins to work out what follows on `step`, which has this ownership and is about to begin."""
        self._next_step = self._thread.submit(self._plan_next_step, step, ownership, members, leaving)

    def _plan_next_step(
        self, step: int, before: Ownership, members: tuple[int, ...], leaving: tuple[int, ...]
    ) -> NextStep:
        with self._locked_in(step):
            return self._next_step_after(before, members, leaving)

    def _next_step_after(self, before: Ownership, members: tuple[int, ...], leaving: tuple[int, ...]) -> NextStep:
        ownership = shadowed(self._context.job, before, members, leaving)
        new = frozenset(
            (worker, slot)
            for slot in before.grid.slots()
            for worker in ownership.shadows_of(*slot)
            if worker not in before.shadows_of(*slot)
        )
        return NextStep(ownership, bool(new), self.default_program(ownership, new))

    def next_step(self) -> NextStep:
        """Returns the step that was last begun to be worked out."""
        assert self._next_step is not None
        self._hurry.set()
        try:
            return self._next_step.result(_MOST_S)
        finally:
            self._hurry.clear()


def well_inside(control: Control, step: int) -> Callable[[], bool]:
    """Returns what says, at the second look, that training is still inside the same long action of `step`, or later.

    It needs the interpreter most when an action begins. Where all are short, any of them is as good, some looks later.
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


def _say_what_failed(done: Future[None]) -> None:
    """Writes an error to the worker's log: who has not prepared takes the usual way, where it comes to the same."""
    if (error := done.exception()) is not None:
        traceback.print_exception(error)
