"""The driver of the shipped coordinator in virtual time, the store, and the coordinator that waits for its death.

Rules: a decision is written by compare-and-swap before its outputs are carried out. A coordinator may die or stop at
each of its moments: before and after a write, and before each message. What only the dead one knew is lost. The host
agent has seen every end of a worker, and tells the next coordinator of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from engine.codec.documents import documents, resume
from engine.core import checkpoint_rules
from engine.core.errors import required
from engine.core.job.job import Job
from engine.core.message_kinds import ToWorker
from engine.core.program.ballot import VoteMessage
from engine.core.program.inventory import PlanPartMessage, PreparePartMessage
from engine.core.protocol import inputs_outputs
from engine.core.protocol.coordinator import is_to_be_kept, step
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.events import WorkerWord
from engine.core.protocol.inputs_outputs import CoordinatorInput
from engine.core.protocol.plan_orders import at_boundary
from tests.simulation.case import Violation
from tests.simulation.plans import planned
from tests.simulation.provenance import CLIP_NORM

if TYPE_CHECKING:
    from tests.simulation.world import World


@lru_cache(maxsize=4096)
def job_of(
    stages: int,
    pipelines: int,
    microbatches: int,
    redundancy: Any,
    level: int,
    steps: int,
    validate_every: int,
    keep_every: int = 0,
    blocks: int = 1,
    elastic: bool = False,
    fsdp: int = 0,
    schedule: str = "1f1b",
    early_stop: bool = False,
    predicts: bool = False,
    residuals: Any = "recompute",
    stages_per_worker: int = 1,
    slices: int = 1,
) -> Job:
    """Returns the job of a case, as far as a coordinator reads it."""
    return Job(
        schedule=schedule,
        stages=stages // blocks,
        stages_per_worker=stages_per_worker,
        blocks=blocks,
        elastic=elastic,
        fsdp=fsdp,
        pipelines=pipelines,
        microbatches=microbatches // slices,
        slices=slices,
        steps=steps,
        clip_norm=CLIP_NORM,
        redundancy=redundancy,
        redundancy_level=level,
        audit=0,
        residuals=residuals,
        validate_every=validate_every,
        early_stop="loss:1" if early_stop and validate_every else "",
        checkpoint_every="0" if predicts else str(keep_every or "end"),
        predict_args={"samples": ""} if predicts else {},
    )


_SLEEP = 400_000_000


class Coordinator:
    """One coordinator. `kept` is the state that it has written last."""

    def __init__(self, world: World, state: CoordinatorState):
        self.world = world
        self.state = self.kept = state
        self.alive = True
        self.is_writing = False
        self.waiting: list[tuple[Callable[..., CoordinatorInput], tuple[Any, ...]]] = []

    @property
    def is_busy(self) -> bool:
        """Whether it takes no input now."""
        return self.is_writing

    def take(self, kind: Callable[..., CoordinatorInput], *words: Any) -> None:
        """Takes an input, as soon as the last decision is written."""
        if self.is_busy:
            self.waiting.append((kind, words))
        elif self.alive:
            self._decide(kind(self.world.now, *words))

    def _decide(self, given: CoordinatorInput) -> None:
        old = self.state
        new, found = step(old, given)
        if new.ballot is not old.ballot and isinstance(given, WorkerWord) and isinstance(given.message, VoteMessage):
            self.world.judge.voted(given.message, given.worker, old.membership)
        if not is_to_be_kept(old, new, given, found):
            self.state = new
            self._carry_out(found)
        elif not self.world.reach():
            self.world.push(_SLEEP, self._wake, new, given, found)
        elif delay := self.world.lag():
            self.is_writing = True
            self.world.push(delay, self._write, new, given, found)
        else:
            self._write(new, given, found)

    def _wake(self, *decision: Any) -> None:
        """Goes on with its decision, as a coordinator that was replaced while it slept."""
        if self.world.coordinator is not self:
            self.alive = True
            self._write(*decision)

    def _write(
        self, new: CoordinatorState, given: CoordinatorInput, found: tuple[inputs_outputs.CoordinatorOutput, ...]
    ) -> None:
        """Writes a decision, unless another coordinator has written since."""
        if not self.alive:
            return
        if self.world.written is not self.kept:
            self.alive = False
            self.world.turns.add("replaced coordinator writes nothing")
            return
        old, self.state = self.state, new
        self.world.written = self.kept = new
        self.is_writing = True  # what a fault brings now is heard after the outputs
        self.world.judge.decided(old, new, given)
        if new.membership is not old.membership:
            self.world.look_at_members()
        if self.world.reach():
            self._carry_out(found)
        self.is_writing = False
        self._take_next()

    def _keep_plan(self, message: ToWorker) -> None:
        """Makes the plan whose part is sent, if no part of it was sent before: workers compare theirs with it."""
        part = message.part if isinstance(message, PreparePartMessage) else message
        if not isinstance(part, PlanPartMessage) or (key := (part.epoch, part.digest)) in self.world.plans:
            return
        plan, prepared = self.state.plan, self.state.preparation.document
        if part is not message:
            plan = at_boundary(self.world.job, required(prepared, "its parts are sent"))
        whole = required(plan, "its parts are sent")
        is_checked = self.world.checks_plans
        self.world.plans[key] = planned(self.world.grid, self.world.case.schedule, whole, is_checked=is_checked)

    def _take_next(self) -> None:
        while self.alive and self.waiting and not self.is_busy:
            kind, words = self.waiting.pop(0)
            self.take(kind, *words)

    def _carry_out(self, found: tuple[inputs_outputs.CoordinatorOutput, ...]) -> None:
        world = self.world
        for output in found:
            if isinstance(output, inputs_outputs.Tell):
                world.judge.told(output.message)
                self._keep_plan(output.message)
                for number in output.workers:
                    world.tell(world.workers[number], output.message)
                    if not world.reach():
                        return  # a host agent passes on the words of the present coordinator only
            elif isinstance(output, inputs_outputs.KeepStep):
                world.await_parts(output.step)
            elif isinstance(output, inputs_outputs.OrphanParts):
                world.gathering = checkpoint_rules.begin_epoch(world.gathering)
            elif isinstance(output, inputs_outputs.Kill):
                world.evict(world.workers[output.worker])
            elif isinstance(output, inputs_outputs.Restart):
                world.restart()
            elif isinstance(output, inputs_outputs.Stop):
                world.stop(output)
            elif isinstance(output, inputs_outputs.Fail):
                raise Violation(f"worker {output.worker} has failed: {output.last}")
                return


def taken_over(world: World) -> Coordinator:
    """Returns a coordinator that goes on from the store."""
    world.written = resume(world.job, documents(world.written), world.now)
    return Coordinator(world, world.written)
