"""The simulated agent and coordinator: it runs the shipped protocol, and sends its orders to the workers.

Rules: it takes events one by one; each order of the protocol becomes a message to each worker, in order. It holds the
ballot of the open step. It does not know the faults.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

from engine.core.coordinator.preparation import PreparedEpoch, prepare_epoch
from engine.core.membership import effects, events
from engine.core.membership.protocol import step
from engine.core.membership.state import Options, Phase, State, begin
from engine.core.messages import PlanMessage, VoteMessage
from engine.core.ownership import Grid, Ownership, Redundancy, Slot, fresh, with_shadows
from engine.core.recovery.ballot import Commit as Outcome
from engine.core.recovery.ballot import open_ballot
from engine.core.schedules.registry import SCHEDULES
from tests.simulation.case import Case, Violation
from tests.simulation.plans import Document, next_program, planned
from tests.simulation.provenance import CLIP_NORM

if TYPE_CHECKING:
    from tests.simulation.world import World


def shadows_in(ownership: Ownership) -> tuple[tuple[int, ...], ...]:
    """Returns the shadows of each slot; a slot may have none."""
    return ownership.shadows or ((),) * len(ownership.owners)


@cache
def first_ownership(
    grid: Grid, redundancy: Redundancy, level: int, stages_per_worker: int = 1, schedule: str = "1f1b"
) -> Ownership:
    """Returns the ownership of a fresh job with its shadows."""
    whole = fresh(grid, stages_per_worker, SCHEDULES[schedule].placement)
    return with_shadows(whole, redundancy, level, whole.owners)


@cache
def first_state(ownership: Ownership, steps: int) -> State:
    """Returns the state of a job whose workers have just joined."""
    shadows = shadows_in(ownership)
    options = Options(stages=ownership.grid.stages, redundant=any(shadows) or ownership.grid.pipelines > 1)
    state = begin(options, ownership.owners, shadows, steps - 1, 0)
    for worker in state.members:
        state, _ = step(state, events.Joined(0, worker, f"node-{worker}"))
    return state


class Agent:
    """The agent of one history."""

    def __init__(self, world: World, case: Case, grid: Grid):
        self.world = world
        self.case = case
        how = (case.redundancy, case.level, case.stages_per_worker, case.schedule)
        self.ownership = first_ownership(grid, *how)
        self.state = first_state(self.ownership, case.steps)
        self.ballot = open_ballot(1, 0, self.ownership, CLIP_NORM)
        self.last: Outcome | None = None
        self.leaving: tuple[int, ...] = ()
        self.prepared_epoch: PreparedEpoch | None = None  # before the last commit

    def hear(self, event: events.Event) -> None:
        """Takes an event, and executes the orders of the protocol."""
        before = self.state
        self.state, found = step(before, event)
        if self.state is not before:
            self.world.judge.state_changed(before, self.state, event)
        for effect in found:
            getattr(self, _OBEY[type(effect)])(effect)

    def on_vote(self, epoch: int, worker: int, number: int, slot: Slot, norm: float | None, loss: float | None) -> None:
        """Takes a vote; a full ballot is a commit, unless the epoch is over."""
        if not self.counts(epoch, worker):
            self.world.turns.add("vote comes too late")
            return
        if epoch != self.state.epoch:
            raise Violation(f"a vote of epoch {epoch} counts in epoch {self.state.epoch}")
        layers, norms = ((), ()) if norm is None else ((slot[1],), (norm,))
        self.ballot, outcome = self.ballot.add(worker, VoteMessage(epoch, number, *slot, layers, norms, loss))
        if outcome is None:
            return
        self.world.judge.committed(outcome, self.ballot.ownership)
        self.last = outcome
        self.prepared_epoch = prepare_epoch(self.state, self.ballot.ownership, self.world.now)
        self.hear(events.StepCommitted(self.world.now, epoch, number, self.ballot.ownership.shadows))

    def counts(self, epoch: int, worker: int) -> bool:
        """Returns whether votes of a worker from an epoch are taken."""
        state = self.state
        return worker in state.members and epoch == state.epoch and state.phase is Phase.RUNNING

    # Orders

    def publish(self, effect: effects.PublishEpoch) -> None:
        """Sends the epoch to all workers, also to the excluded."""
        for worker in self.world.workers:
            self.world.tell(worker, "epoch", effect.epoch, effect.members)

    def plan(self, effect: effects.PublishPlanInput) -> None:
        """Sends the inputs of the plan to every member."""
        clip, told = self.last.clip_factor if self.last else 1.0, effect.document
        self.leaving = told.leaving
        self.ownership = Ownership(self.ownership.grid, told.owners, told.shadows)
        document = Document(
            told.epoch, told.committed, self.ownership, told.members, self.leaving, told.inventories, clip
        )
        self.compare(told, document)
        for number in told.members:
            self.world.tell(self.world.workers[number], "plan", document)

    def compare(self, told: PlanMessage, document: Document) -> None:
        """Checks that an epoch made at a commit was prepared before it, with the same plan."""
        if self.state.phase is not Phase.RECONFIGURING:
            return
        assert self.prepared_epoch is not None
        prepared_epoch = self.prepared_epoch.document
        if replace(prepared_epoch, inventories=()) != replace(told, inventories=()):
            raise Violation(f"{prepared_epoch} was foreseen, and {told} has come")
        if planned(document._replace(inventories=prepared_epoch.inventories)).plan != planned(document).plan:
            raise Violation(f"epoch {told.epoch} has another plan than was foreseen")
        self.world.turns.add("epoch is foreseen")

    def start(self, effect: effects.StartTraining) -> None:
        """Opens a new ballot and lets all members run the plan; while the job drains there is no plan to run."""
        if self.state.phase is not Phase.RUNNING:
            return
        if self.ballot.epoch != effect.epoch:
            self.ballot = open_ballot(effect.epoch, self.state.committed + 1, self.ownership, CLIP_NORM)
        for number in self.state.members:
            self.world.tell(self.world.workers[number], "go", effect.epoch)

    def commit(self, effect: effects.AnnounceCommit) -> None:
        """Sends the commit to all members; opens the ballot of the next step under the healed ownership."""
        assert self.last is not None and self.last.step == effect.step
        if effect.then == "step" and self.ballot.step == effect.step:
            case, ownership = self.case, self.ballot.ownership
            members, leaving = self.state.members, self.leaving
            healed, _ = next_program(
                *(case.schedule, ownership, case.redundancy, case.level, case.log_every, members, leaving)
            )
            self.ballot = open_ballot(effect.epoch, effect.step + 1, healed, CLIP_NORM)
        self.world.decided(effect.step)
        for number in self.state.members:
            worker = self.world.workers[number]
            self.world.tell(worker, "commit", effect.epoch, effect.step, self.last.clip_factor, effect.then)

    def look(self, effect: effects.Look) -> None:
        """Ends a look by the clock; exits are seen as they happen."""
        self.world.tick_after(self.state.options.look_ns + 1)

    def evict(self, effect: effects.Evict) -> None:
        """Kills an excluded worker, which may take a while."""
        self.world.evict(self.world.workers[effect.worker])

    def end(self, effect: effects.Effect) -> None:
        """Lets all workers leave."""
        for worker in self.world.workers:
            self.world.tell(worker, "end")

    def nothing(self, effect: effects.Effect) -> None:
        """Does nothing: an epoch itself asks the workers for their inventories."""


_OBEY = {
    effects.PublishEpoch: "publish",
    effects.GatherInventories: "nothing",
    effects.PublishPlanInput: "plan",
    effects.StartTraining: "start",
    effects.AnnounceCommit: "commit",
    effects.OrderHandOver: "nothing",
    effects.Look: "look",
    effects.Evict: "evict",
    effects.Fence: "nothing",
    effects.Finish: "end",
    effects.Halt: "end",
}
