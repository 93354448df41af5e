"""The judge: checks the promises of the engine against the faults of the world and the run without faults.

Rules:
- After every step each replica of each slot has the state of the fault-free run.
- The loss of each step is known once.
- State is lost exactly when no member has a complete replica of a stage, from any source.
- No healthy worker is excluded.
- A job with every step committed has finished, whichever workers are lost then.
- The check of a real run finds that each committed step counted each sample once, where slots changed hands inside one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

from engine.core.errors import required
from engine.core.exclusion import Cause
from engine.core.message_kinds import ToWorker
from engine.core.messages import EpochMessage
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.ballot import Commit as Outcome
from engine.core.program.ballot import VoteMessage
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.inputs_outputs import ClockTick, CoordinatorInput
from engine.core.protocol.state import GATHERING, Phase, State
from tests.simulation.case import PREDICTED, SHORT, Fault, Violation
from tests.simulation.compiled import BACKWARD, INPUT, KINDS, key_of, parts_of
from tests.simulation.counting import SampleCounts
from tests.simulation.plans import read
from tests.simulation.provenance import fault_free

if TYPE_CHECKING:
    from tests.simulation.executor import Executor
    from tests.simulation.replica import Replica
    from tests.simulation.world import World

_SILENCE_US = 4_000_000  # a shorter stop must not exclude a worker
_STARTS = 4  # of a job whose workers die before the first step
_OF_THE_CLOCK = frozenset({"zombie", "pause", "suspect"})


WAITS_ON = "worker without memory waits on in an epoch"
INSIDE = "slot is handed over inside a step"
MOVED = "slot moves to its wanted owner"
DARK = "end of a dark edge is given up"


class Judge:
    """The judge of one history."""

    def __init__(self, world: World, grid: Grid):
        self.world = world
        self.grid = grid
        self.reference = fault_free(grid, world.case.steps)
        self.outcomes: list[Outcome] = []
        self.struck: set[int] = set()
        self.noticed: set[int] = set()
        self.paused_us: Counter[int] = Counter()  # by worker
        self.clock_may_rule = False
        self.ownership = world.ownership  # of the last commit
        self.holders = self._holders(world.ownership)
        self.stopped = False
        self.ready: set[int] = set()  # the waiting workers of this start, so far
        self.ended: set[int] = set()  # those that were no members when they were lost, or are out
        self.epochs: dict[int, EpochMessage] = {}
        self.backwards: Counter[tuple[int, Slot, int]] = Counter()  # runs, by step, slot and microbatch
        self.made: dict[int, tuple[int, set[int]]] = {}
        self.owners: dict[tuple[int, Slot], int] = {}  # of each slot in each epoch, as they voted
        self.votes: set[tuple[int, int, int, Slot]] = set()  # the epoch, step, worker and slot of each that counted
        self.samples = SampleCounts(world)
        self.entered: dict[int, tuple[int, ...]] = {}  # the owners of all slots in each epoch, as workers know them

    def guilty(self, worker: Executor, fault: Fault) -> None:
        """Notes a fault of a worker, for which it may be excluded."""
        if fault.kind == "stop":
            self.stopped = True
        elif fault.kind in ("notice", SHORT):
            self.noticed.add(worker.number)
        if fault.kind == SHORT:
            self.struck.add(worker.number)  # at the end of its grace
            self.clock_may_rule = True
        if fault.kind == "pause":  # the next one may come before a sign of life
            self.paused_us[worker.number] += fault.length
        if fault.kind in ("kill", "zombie") or self.paused_us[worker.number] > _SILENCE_US:
            self.struck.add(worker.number)
        if fault.kind in _OF_THE_CLOCK or fault.hinders:
            self.clock_may_rule = True

    def stepped(self, worker: Executor, replica: Replica) -> None:
        """Checks a replica after it has taken the open step of its worker."""
        if replica.version != worker.step + 1:
            raise Violation(f"worker {worker.number}: {replica.slot} has version {replica.version} after {worker.step}")
        if replica.version > len(self.outcomes):
            raise Violation(f"worker {worker.number} takes step {worker.step}, which is not committed")
        self._compare(worker, replica)

    def _compare(self, worker: Executor, replica: Replica) -> None:
        """Raises Violation if a replica differs from the run without faults."""
        expected = self.reference.states[replica.version][replica.slot[1]]
        if replica.state() != expected:
            names = ("weights", "optimizer state", "buffers")
            wrong = [name for name, is_, be in zip(names, replica.state(), expected, strict=True) if is_ != be]
            what = f"{' and '.join(wrong)} of slot {replica.slot} differ"
            raise Violation(f"worker {worker.number}: {what} at the beginning of step {replica.version}")

    def kept(self, worker: Executor, step: int, slot: Slot) -> None:
        """Checks a replica that is to be written as a checkpoint: whole, and as it was after the step."""
        replica = worker.replicas.get(slot)
        if replica is None or replica.version != step + 1 or worker.step != step + 1:
            raise Violation(f"worker {worker.number} keeps slot {slot} of step {step}, which it does not hold")
        self._compare(worker, replica)

    def enters(self, worker: Executor) -> None:
        """Checks that all workers of an epoch have the same owners of all slots in their programs."""
        owners = worker.ownership.owners
        if self.entered.setdefault(worker.epoch, owners) != owners:
            raise Violation(f"worker {worker.number} has other owners than those of epoch {worker.epoch}")

    def computed(self, worker: Executor, action: tuple[Any, ...]) -> None:
        """Notes a forward or backward of a worker, whose value another worker may need."""
        if worker.number not in self.made or self.made[worker.number][0] != worker.step:
            self.made[worker.number] = (worker.step, set())
        if action[6]:
            self.made[worker.number][1].add(action[4])
        if action[0] in (BACKWARD, INPUT):
            self.backwards[worker.step, action[1], action[2]] += 1

    def inventoried(self, worker: Executor, text: str) -> None:
        """Checks an inventory: complete replicas, and all values of this step that the worker has made for others."""
        for slot in read(text).whole:
            self._compare(worker, worker.replicas[slot])
        step, made = self.made.get(worker.number, (-1, set()))
        if step == worker.step and self.world.retains:
            said = {key_of(KINDS[value.kind], *value[1:]) for value in read(text).values}
            if not made <= said:
                gone = [parts_of(key) for key in sorted(made - said)]
                raise Violation(f"worker {worker.number} no longer holds {gone}, which it has made in step {step}")

    def decided(self, old: CoordinatorState, new: CoordinatorState, given: CoordinatorInput) -> None:
        """Checks a decision that has been written."""
        if new.commit is not old.commit:
            ownership = required(old.ballot, "a ballot").ownership
            self._committed(required(new.commit, "a commit"), ownership, old.membership.epoch)
            self.world.decided(new.membership.committed)
        if new.epoch is not old.epoch and new.epoch is not None and new.epoch.digest is not None:
            self.world.turns.add("prepared hand-over is taken")
        if new.membership is not old.membership:
            self._state_changed(old.membership, new.membership, isinstance(given, ClockTick))

    def told(self, message: ToWorker) -> None:
        """Checks a message of the coordinator: an epoch has one meaning, whichever coordinator tells it."""
        if isinstance(message, EpochMessage) and self.epochs.setdefault(message.epoch, message) != message:
            raise Violation(f"two different epochs {message.epoch}")

    def voted(self, vote: VoteMessage, worker: int, state: State) -> None:
        """Checks a vote that has counted."""
        if vote.epoch != state.epoch or worker not in state.members:
            raise Violation(f"a vote of worker {worker} in epoch {vote.epoch} counts in epoch {state.epoch}")
        for each in vote.slots:
            at = (vote.epoch, (each.pipeline, each.stage))
            self.votes.add((vote.epoch, vote.step, worker, at[1]))
            if each.layers and self.owners.setdefault(at, worker) != worker:
                raise Violation(f"workers {self.owners[at]} and {worker} own slot {at[1]} in epoch {vote.epoch}")

    def _committed(self, outcome: Outcome, ownership: Ownership, epoch: int) -> None:
        """Checks the outcome of a full ballot."""
        number = outcome.step
        if number != len(self.outcomes):
            raise Violation(f"step {number} is committed after {len(self.outcomes)} steps")
        if (outcome.loss, outcome.clip_factor) != (self.reference.losses[number], self.reference.clips[number]):
            raise Violation(f"the loss or the clip factor of step {number} differs")
        self.outcomes.append(outcome)
        for slot in ownership.grid.slots():
            for worker in map(self.world.workers.__getitem__, ownership.replicas(*slot)):
                replica = worker.replicas.get(slot)
                if (epoch, number, worker.number, slot) not in self.votes:
                    raise Violation(f"step {number} is committed without worker {worker.number}'s vote for {slot}")
                if worker.alive and (replica is None or replica.version != number or replica.logged is None):
                    raise Violation(f"step {number} is committed, and worker {worker.number} is not ready in {slot}")
        self.ownership = ownership
        self.holders = self._holders(ownership)

    def _holders(self, ownership: Ownership) -> dict[Slot, set[int]]:
        """Returns for each slot the workers that hold its state at the last commit, and must keep it."""
        return {
            slot: {worker for pipeline in self._alike(slot) for worker in ownership.replicas(pipeline, slot[1])}
            for slot in ownership.grid.slots()
        }

    def _alike(self, slot: Slot) -> Collection[int]:
        """Returns the pipelines with the same state of a stage as in a slot: all, unless it is in shards."""
        return (slot[0],) if self.grid.fsdp else range(self.grid.pipelines)

    def _state_changed(self, old: State, new: State, is_tick: bool) -> None:
        """Checks a decision of the protocol."""
        self._check_verdict(old, new, is_tick)
        self.samples.decided(old, new)
        if new.epoch == old.epoch and new.phase is old.phase:
            return
        self._check_plans(old, new)
        members = frozenset(new.members)
        lost = tuple(sorted({slot[1] for slot in self.grid.slots() if not self._is_held(slot, members)}))
        if new.phase is Phase.FINISHED:
            if new.lost_stages and new.lost_stages != lost:
                raise Violation(f"finished with {new.lost_stages} lost ({lost} indeed): {new.reason}")
        elif new.phase is Phase.HALTED:
            if new.committed >= new.last_step:
                raise Violation(f"halted with {new.exit_code} when every step was committed: {new.reason}")
            if new.exit_code == 143 and self.stopped and new.committed < 0:
                return
            if new.exit_code == 3 and self._must_bear(old):
                return
            if new.exit_code not in (3, 80) or not lost or (new.exit_code == 80 and new.lost_stages != lost):
                raise Violation(f"halted with {new.exit_code}, {new.lost_stages} lost ({lost} indeed): {new.reason}")
        elif lost and new.phase is Phase.RUNNING:
            raise Violation(f"nobody holds {lost} any more, and the job goes on")

    def _check_verdict(self, old: State, new: State, is_tick: bool) -> None:
        """Checks that members change with an epoch only, and each for its own reason."""
        if new.members != old.members and new.epoch <= old.epoch and old.phase is not Phase.RESTARTING:
            raise Violation(f"members changed without an epoch: {new.reason}")
        self._check_waiting(old, new)
        if new.epoch == old.epoch:
            return
        self._check_owners(old, new)
        for out in new.verdict:
            if out.worker not in old.members:
                raise Violation(f"worker {out.worker} is no member, and its loss makes an epoch")
            if out.cause is Cause.LEFT:
                is_missed = self._is_missed(out.worker, old) if new.planned else out.worker in old.owners
                is_known = out.worker in self.noticed and not is_missed
            else:
                links = self.world.links
                any_end = len(old.members) == 2 or self._must_bear(old)
                struck = self.struck | (links.ends if any_end else links.struck)
                is_known = out.worker in (old.done if out.cause is Cause.FINISHED else struck)
            if not is_known:
                raise Violation(f"worker {out.worker} {out.why}, but nothing was done to it")
            if out.cause is Cause.GIVEN_UP:
                self._check_given_up(out.worker, old)
        if new.reason.startswith("no worker moved") and [*self.world.links.dark_edges()]:
            raise Violation(f"a dark edge was not seen: {new.reason}")
        if is_tick and not self.clock_may_rule:
            raise Violation(f"the clock had to rule: {new.reason}")

    def _check_waiting(self, old: State, new: State) -> None:
        """Checks that a number has one life, and that each verdict takes in as many as are missing."""
        if new.phase is Phase.RESTARTING:  # all numbers get other processes
            self.ready, self.ended = set(), set()
            return
        self.ended.update(new.lost, new.out)
        if again := [worker for worker in {*new.waiting} - {*old.waiting} if worker in {*self.ready, *self.ended}]:
            raise Violation(f"number {again[0]} is used twice")
        self.ready.update(new.waiting)
        if {*new.members} - {*old.members, *old.waiting}:
            raise Violation(f"{new.members} became members, and {old.waiting} waited")
        if without := {*new.members} & {*old.waiting} & {*old.cramped}:
            raise Violation(f"{without} became members without memory for a slot")
        able = [worker for worker in new.waiting if worker not in old.cramped]
        staying = {*new.members} - {*new.leaving}
        if new.epoch > old.epoch > 0 and new.phase is Phase.FAILING_OVER and not old.is_over:
            most = max(new.options.workers, len({*old.members} - {*old.leaving, *new.leaving}))
            if able and len(staying) < most:
                raise Violation(f"{able} wait on in epoch {new.epoch}")
            joined = ({*new.members} & {*old.waiting}) - {*old.eager}
            if joined and len(staying) > most:
                raise Violation(f"{joined} became members, and nobody was missing")
        if any(worker in old.cramped for worker in new.waiting) and new.epoch > old.epoch > 0:
            self.world.turns.add(WAITS_ON)
        if new.phase is Phase.FORMING and new.nodes.keys() >= {*new.members}:
            raise Violation("every member has joined, and training does not begin")

    def _check_owners(self, old: State, new: State) -> None:
        """Checks that a slot leaves a member at a step boundary only, for a worker with a whole replica."""
        for slot, before, after in zip(self.grid.slots(), old.owners, new.owners, strict=True):
            if before == after or before not in new.members:
                continue
            if before in new.going:
                self.world.turns.add(INSIDE)
                if slot not in self.world.workers[after].replicas and after not in self.holders[slot]:
                    raise Violation(f"worker {after} takes over slot {slot} inside the step without a replica")
                continue
            if not new.planned:
                raise Violation(f"slot {slot} leaves worker {before} in an open step: {new.reason}")
            if after not in self.holders[slot]:
                raise Violation(f"worker {after} inherits slot {slot} without a whole replica: {new.reason}")
            if before not in old.leaving:
                self.world.turns.add(MOVED)

    def _check_given_up(self, worker: int, old: State) -> None:
        """Checks that the worker can be replaced, and lies on the most dark edges of all that can be."""
        others = frozenset(old.members) - {worker}
        if any(owner == worker and not self._is_held(slot, others) for slot, owner in self._owners(old)):
            raise Violation(f"worker {worker} is given up, and nobody else holds what it owns")
        if old.look:
            return  # transfers broke: only the rule of the struck ones
        self.world.turns.add(DARK)
        edges = {frozenset(edge) for edge in self.world.links.dark_edges()}
        lying = Counter(end for edge in edges for end in edge)
        most = max((number for end, number in lying.items() if self._is_replaceable(end, old)), default=0)
        if not lying[worker] or lying[worker] < most:
            raise Violation(
                f"worker {worker} is given up as a mere witness of the dark edges {sorted(map(sorted, edges))}"
            )

    def _owners(self, state: State) -> Iterator[tuple[Slot, int]]:
        return zip(self.grid.slots(), state.owners, strict=True)

    def _is_replaceable(self, worker: int, state: State) -> bool:
        """Whether other members hold all that a worker owns, as of the last commit."""
        others = {*state.members} - {worker}
        return all(owner != worker or not self.holders[slot].isdisjoint(others) for slot, owner in self._owners(state))

    def _must_bear(self, state: State) -> bool:
        """Whether links are broken for long, and no member with such a fault can be replaced."""
        struck = self.world.links.struck.intersection(state.members)
        return bool(struck) and not any(self._is_replaceable(worker, state) for worker in struck)

    def _check_plans(self, old: State, new: State) -> None:
        """Checks that training goes on only when all members have made the plan."""
        if old.phase in GATHERING and new.phase in (Phase.RUNNING, Phase.DRAINING):
            for number in new.members:
                if not self.world.workers[number].has_planned(new.epoch):
                    raise Violation(f"training goes on, but worker {number} has not made the plan")

    def _is_missed(self, worker: int, old: State) -> bool:
        """Whether a leaving worker owns a slot, or is the shadow of one that a staying worker could shadow."""
        staying = {*old.members}.difference(old.leaving)
        for owner, slot in zip(old.owners, self.grid.slots(), strict=True):
            holders = self.ownership.replicas(*slot)
            if owner == worker or (
                old.options.redundant
                and worker in holders
                and staying - {owner}
                and staying.isdisjoint({*holders} - {owner})
            ):
                return True
        return False

    def _is_held(self, slot: Slot, members: Collection[int]) -> bool:
        """Whether a member has a complete replica for a slot: of the last commit, or with the log that leads to it.

        A worker with a replica at the commit must still have it.
        """
        committed = len(self.outcomes)
        return not self.holders[slot].isdisjoint(members) or any(
            replica.version == committed or (replica.version == committed - 1 and replica.logged is not None)
            for number in members
            for (pipeline, each), replica in self.world.workers[number].replicas.items()
            if each == slot[1] and pipeline in self._alike(slot)
        )

    def end(self) -> None:
        """Checks the end of the history: the job has finished with every step, or was lost."""
        if INSIDE in self.world.turns and (wrong := self.samples.miscounted(len(self.outcomes))):
            raise Violation(f"samples: {wrong[0]}, and {len(wrong) - 1} more")
        state = self.world.membership
        late = any(fault.kind in _OF_THE_CLOCK for fault in self.world.struck)  # only a death starts the job again
        if not self.world.coordinator.state.started and (late or self.world.starts == _STARTS):
            return
        if state.phase is Phase.FINISHED:
            steps = state.last_step + 1
            if len(self.outcomes) != steps or (steps != self.world.case.planned_steps and not self.stopped):
                raise Violation(f"finished after {len(self.outcomes)} steps")
            has_all = not state.lost_stages and state.members and len(state.done) == len(state.members)
            predicts = self.world.case.predicts
            if has_all and not (PREDICTED in self.world.turns if predicts else state.last_step in self.world.whole):
                what = "the outputs are not whole" if predicts else "the state after it is not kept"
                raise Violation(f"finished with step {state.last_step}, and {what}")
            for number in () if state.lost_stages else state.members:
                worker = self.world.workers[number]
                if worker.step != steps:
                    raise Violation(f"worker {number} has finished in step {worker.step}")
                if old := [group for group in (*worker.next_groups, *worker.attempts) if group <= worker.group]:
                    raise Violation(f"worker {number} still has the groups {old}, and is in group {worker.group}")
                if worker.alive and not self._must_bear(state):
                    raise Violation(f"worker {number} has not been told that all have finished")
            for number in state.waiting if has_all else ():
                if self.world.workers[number].alive and not self.world.workers[number].paused:
                    raise Violation(f"worker {number}, which waits, has not been told that all have finished")
        elif state.phase is not Phase.HALTED:
            raise Violation(f"over while {state.phase}")
