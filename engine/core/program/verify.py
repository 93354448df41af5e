"""Verification of a program before it runs: complete, well ordered, and free of deadlock.

The happens-before rule stands in the table of ops, and the expected actions stand below. This module compares
a program with both, and adds the order of transfers: each pair of workers receives in the order of its sends. A shadow
may run forwards of its slot, any number of them from the first on.

The plan of a recovery is verified in the same way. It is the rest of a step and begins with values that workers hold:

    whole step   0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP
    plan         0RECV_B0 0B0 0REDUCE_GRAD 0LOG 0COMMIT 0STEP               held: residual 0, counter 0 of stage 0
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from engine.core.action import (
    ALL,
    COMPUTE_OPS,
    FORWARD_OPS,
    LEAVE_OPS,
    OP_TABLE,
    RECEIVE_OPS,
    SEND_OPS,
    SHARD_OPS,
    STASH_OPS,
    WHOLE_STAGE,
    Action,
    Op,
    Program,
    StepPosition,
    WeightForm,
    ops_at,
)
from engine.core.errors import DeadlockError, InvariantError, ScheduleError
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import DependencyIndex, carried, makes, needs
from engine.core.program.dry_run import refuse_stuck, stash_of
from engine.core.program.remaining_tasks import progress_of
from engine.core.value import WIRE, Held, Kind, Value

# The actions that a step must have, each on the worker that must run it, read off the table of ops.
#
# A whole step has every forward and backward; the plan of a recovery has the rest of one:
#
#     whole step   0F0 0F1 0B0 0B1  ...           every microbatch, all transfers
#     plan         0F1 0B0 0B1      ...           worker 0 had counted microbatch 0 and added none

Mine = dict[tuple[int, Op, int], dict[int, bool]]  # stage, op, pipeline -> microbatch -> whether it stands there
ExpectedActions = Mapping[int, Mine]  # worker -> its actions of a step

_AT_SHADOWS_TOO = frozenset({StepPosition.STREAM, StepPosition.REPLICA, StepPosition.HEALING})
_PARTS = ops_at(StepPosition.PART)
_STREAMS = ops_at(StepPosition.STREAM)
_HANDS = ops_at(StepPosition.HAND_OVER)
_HEALS = ops_at(StepPosition.HEALING)
_COMPUTES = {Op.F: Kind.COUNTED, Op.B: Kind.ADDED}  # with the counter of those that are done
_TRANSFERS = tuple((op, row.peer) for op, row in OP_TABLE.items() if row.stands is StepPosition.BORDER)
_ONCE = tuple(op for op, row in OP_TABLE.items() if row.stands is StepPosition.STAGE)
_OF_REPLICAS = tuple(op for op, row in OP_TABLE.items() if row.stands is StepPosition.REPLICA)


def expected_actions(
    program: Program, ownership: Ownership, healing: Collection[tuple[int, Slot]], held: Collection[Held] | None = None
) -> ExpectedActions:
    """Returns the actions that a whole step must have or, if `held` is given, the rest of a step.

    A slot has its backwards whole, or in parts if the owner has one. Every shadow takes a stream that the owner sends.
    Transfers are expected in a whole step only.
    """
    there = frozenset(held or ())
    whole: dict[int, Mine] = {worker: {} for worker in ownership.workers()}
    progress = _progress(program, ownership, there)
    for slot in ownership.grid.slots():
        pipeline, stage = slot
        owner, num_microbatches = ownership.owner(*slot), ownership.grid.microbatches
        for op, counter in _COMPUTES.items():
            first = num_microbatches if _is_done(slot, ownership, there) else progress.get((counter, *slot), 0)
            whole[owner][stage, op, pipeline] = dict.fromkeys(range(first, num_microbatches), False)
        for op in _transfers(slot, ownership) if held is None else ():
            whole[owner][stage, op, pipeline] = dict.fromkeys(range(num_microbatches), False)
        for op, worker in _once_each(slot, ownership):
            made = makes(Action(stage, op, pipeline=pipeline), worker, ownership)
            if not made or not there.issuperset(made):
                whole[worker][stage, op, pipeline] = {WHOLE_STAGE: False}
    for worker, (pipeline, stage) in sorted(healing):
        for op in _HEALS:
            _expect(whole, (worker, ownership.owner(pipeline, stage)), Action(stage, op, pipeline=pipeline))
    for worker, actions in program.items():
        if parts := [action for action in actions if action.op in _PARTS]:
            _split(whole.get(worker, {}), parts, frozenset(actions), frozenset(v for w, v in there if w == worker))
        for action in actions:
            slot = (action.pipeline, action.stage)
            if (
                action.op in _STREAMS
                and ownership.grid.has(*slot, action.microbatch)
                and worker == ownership.owner(*slot)
            ):
                takers = [each for each in ownership.shadows_of(*slot) if (each, slot) not in healing]
                _expect(whole, (worker, *takers) if takers else (), action)
            if _gives(action, worker, ownership, there):
                _expect(whole, (worker, ownership.owner(*slot)), action)
    return whole


def _gives(action: Action, worker: int, ownership: Ownership, there: Collection[Held]) -> bool:
    """Says whether the action gives the owner of its slot what `worker` holds at the start: a sum or a residual."""
    stage, op, microbatch, pipeline = action
    if (
        op not in _HANDS
        or not ownership.grid.has(pipeline, stage, microbatch)
        or ownership.owner(pipeline, stage) == worker
    ):
        return False
    return (worker, Value(OP_TABLE[op].needs[0].kind, pipeline, stage, microbatch)) in there


def _progress(program: Program, ownership: Ownership, there: Collection[Held]) -> dict[tuple[Kind, int, int], int]:
    """Returns the microbatches that owners have counted and added, accumulators that are handed to them included."""
    progress = progress_of(ownership, there, ())
    for worker, actions in program.items():
        for action in actions:
            if _gives(action, worker, ownership, there):
                for kind in {term.kind for term in OP_TABLE[action.op].makes}.intersection(_COMPUTES.values()):
                    at = (kind, action.pipeline, action.stage)
                    progress[at] = max(progress.get(at, 0), action.microbatch + 1)
    return progress


def _is_done(slot: Slot, ownership: Ownership, there: Collection[Held]) -> bool:
    return (ownership.owner(*slot), Value(Kind.REDUCED, *slot)) in there


def _transfers(slot: Slot, ownership: Ownership) -> Iterator[Op]:
    pipeline, stage = slot
    owner = ownership.owner(*slot)
    for op, peer in _TRANSFERS:
        if 0 <= stage + peer < ownership.grid.stages and ownership.owner(pipeline, stage + peer) != owner:
            yield op


def _once_each(slot: Slot, ownership: Ownership) -> Iterator[tuple[Op, int]]:
    pipeline, stage = slot
    owner = ownership.owner(*slot)
    if ownership.pipelines_of(owner, stage)[0] == pipeline:
        yield from ((op, owner) for op in _ONCE)
    for replica in ownership.replicas(*slot):
        yield from ((op, replica) for op in _OF_REPLICAS)


def _split(mine: Mine, parts: Collection[Action], present: Collection[Action], held: Collection[Value]) -> None:
    """Expects both parts of a backward in place of the whole where a part stands; the first may be held."""
    for stage, _, microbatch, pipeline in parts:
        back = mine.get((stage, Op.B, pipeline), {})
        if microbatch in back and Action(stage, Op.B, microbatch, pipeline) not in present:
            del back[microbatch]
            is_half_done = Value(Kind.PENDING, pipeline, stage, microbatch) in held
            for part in (Op.W,) if is_half_done else (Op.I, Op.W):
                mine.setdefault((stage, part, pipeline), {})[microbatch] = False


def _expect(whole: dict[int, Mine], workers: Iterable[int], action: Action) -> None:
    stage, op, microbatch, pipeline = action
    for worker in workers:
        whole.setdefault(worker, {}).setdefault((stage, op, pipeline), {})[microbatch] = False


class Duties:
    """The actions that a worker may run although a step does not need them there."""

    def __init__(
        self,
        program: Program,
        ownership: Ownership,
        healing: Collection[tuple[int, Slot]],
        held: Collection[Held] | None,
    ) -> None:
        self._ownership = ownership
        self._healing = healing
        self._is_plan = held is not None
        self._there = frozenset(held or ())
        self._progress = _progress(program, ownership, self._there)

    def why_not(self, action: Action, worker: int) -> str:
        """Returns the rule that an unexpected action breaks, or an empty text."""
        stage, op, _, pipeline = action
        grid, row = self._ownership.grid, OP_TABLE[op]
        if not grid.has(action.pipeline, action.stage, action.microbatch):
            return f"outside the grid of {grid.pipelines} x {grid.stages} slots and {grid.microbatches} microbatches"
        owner = self._ownership.owner(pipeline, stage)
        is_shadow = worker in self._ownership.shadows_of(pipeline, stage)
        if row.stands is StepPosition.WRITER or (row.stands is StepPosition.AGAIN and not self._is_plan):
            return "no part of a whole step"
        if row.touches and row.stands is not StepPosition.HEALING and (worker, (pipeline, stage)) in self._healing:
            return "has no whole replica of its slot yet"
        sends = self._is_plan and op in SEND_OPS  # any worker may send a value that it holds
        forwards = is_shadow and row.stands is StepPosition.FORWARD and not self._is_plan
        stashes = worker in (owner, *self._ownership.shadows_of(pipeline, stage)) and row.stands is StepPosition.STASH
        if sends or forwards or stashes or (worker == owner and row.stands is StepPosition.ANY_TIMES):
            return ""
        if worker != owner and not (is_shadow and row.stands in _AT_SHADOWS_TOO):
            return f"belongs to worker {owner}, the owner of its slot"
        return self._in_plan(action) if self._is_plan else _WHY_NOT.get(row.stands, NO_PEER)

    def _in_plan(self, action: Action) -> str:
        """Returns the rule that an action of its slot's owner breaks in a plan, if the rest of the step lacks it."""
        stage, op, microbatch, pipeline = action
        counted = microbatch < self._progress.get((Kind.COUNTED, pipeline, stage), 0)
        if op in RECEIVE_OPS or (op is Op.REDO_F and counted):
            return ""
        if op is Op.I:  # for its gradient alone, if the microbatch has been added, or the other part is left
            is_added = microbatch < self._progress.get((Kind.ADDED, pipeline, stage), 0)
            is_added = is_added or _is_done((pipeline, stage), self._ownership, self._there)
            half = self._ownership.owner(pipeline, stage), Value(Kind.PENDING, pipeline, stage, microbatch)
            return "" if is_added or half in self._there else _IN_ANOTHER_FORM
        if op is Op.REDO_F:
            return "runs a forward again that has not been counted"
        if op is Op.F and not counted and _is_done((pipeline, stage), self._ownership, self._there):
            return ""  # it updates the buffers, which the activations of later microbatches depend on
        return _WHY_NOT_IN_PLAN.get(OP_TABLE[op].stands, "is not part of the rest of the step")


_IN_ANOTHER_FORM = "stands beside a backward of this microbatch in another form"
NO_PEER = "there is no other worker at the other end"
_WHY_NOT = {
    StepPosition.BACKWARD: _IN_ANOTHER_FORM,
    StepPosition.PART: _IN_ANOTHER_FORM,
    StepPosition.STAGE: "the worker reduces this stage with the first of its pipelines",
    StepPosition.HEALING: "heals nobody",
}
_WHY_NOT_IN_PLAN = {
    StepPosition.FORWARD: "counts a microbatch that has been counted",
    StepPosition.BACKWARD: "adds a microbatch that has been added, or stands beside a backward in another form",
    StepPosition.PART: "adds a microbatch that has been added, or stands beside a backward in another form",
}


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken rule, and its place."""

    worker: int
    position: int
    action: str
    rule: str

    def __str__(self) -> str:
        place = f", position {self.position}" if self.position >= 0 else ""
        return f"worker {self.worker}{place}: {self.action}: {self.rule}"


Violations = Iterator[Violation]


def verify(
    program: Program,
    ownership: Ownership,
    healing: Collection[tuple[int, Slot]] = (),
    held: Collection[Held] | None = None,
) -> tuple[Violation, ...]:
    """Returns every rule that the program of a step breaks; an empty tuple means that it runs to its end.

    `healing` are the shadows, as (worker, slot), that get the state of their slot during the step. `held` are the
    values at the start of a plan, which is the rest of a step (of a counter the last index); None for a whole step.
    """
    whole = expected_actions(program, ownership, healing, held)  # the next line ticks off the right ones
    violations = [*_wrong_actions(program, ownership, whole, Duties(program, ownership, healing, held))]
    if not violations and held is not None:
        violations = [*_unpaired_sends(program)]
    if violations:
        return tuple(violations)
    stuck: ScheduleError | None = None
    try:
        refuse_stuck(program, ownership, held or ())
    except ScheduleError as error:
        stuck = error
    missing = [*_missing_actions(whole)]
    if stuck:
        violations = [*missing, *_wrong_order(program, ownership, frozenset(held or ()), name_gaps=not missing)]
    violations = violations or missing or [*_crossed_transfers(program, ownership), *_taken_away(program)]
    if STASH_OPS & {action.op for actions in program.values() for action in actions}:
        violations = violations or [*_misplaced_stash(program, ownership)]
    if stuck and not violations:
        if not isinstance(stuck, DeadlockError):  # every gap is a violation
            raise InvariantError(str(stuck))
        worker, action = stuck.cycle[0]
        violations = [Violation(worker, list(map(str, program[worker])).index(action), action, str(stuck))]
    return tuple(violations)


def _wrong_actions(program: Program, ownership: Ownership, whole: ExpectedActions, duties: Duties) -> Violations:
    for worker, actions in program.items():
        mine = whole.get(worker, {})
        for position, action in enumerate(actions):
            stage, op, microbatch, pipeline = action
            line = mine.get((stage, op, pipeline), {})
            stands = line.get(microbatch)
            if stands is False:
                line[microbatch] = True
                continue
            rule = "stands twice" if stands else duties.why_not(action, worker)
            if rule:
                yield Violation(worker, position, str(action), rule)
            elif op not in SHARD_OPS:  # a step may repeat them
                mine.setdefault((stage, op, pipeline), {})[microbatch] = True


def _unpaired_sends(program: Program) -> Violations:
    """In a plan, each value that is sent has one sender and a taker."""
    taken = {carried(action) for actions in program.values() for action in actions if action.op in RECEIVE_OPS}
    sender: dict[Value, int] = {}
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            if action.op in SEND_OPS:
                value = carried(action)
                first = sender.setdefault(value, worker)
                rule = f"is sent by worker {first} too" if first != worker else "" if value in taken else NO_PEER
                if rule:
                    yield Violation(worker, position, str(action), rule)


def _missing_actions(whole: ExpectedActions) -> Violations:
    for worker, mine in whole.items():
        for (stage, op, pipeline), line in mine.items():
            for microbatch, stands in line.items():
                if not stands:
                    yield Violation(worker, -1, str(Action(stage, op, microbatch, pipeline)), "is missing")


def _wrong_order(program: Program, ownership: Ownership, held: Collection[Held], name_gaps: bool) -> Violations:
    """An action stands behind the maker of a value that it needs; with `name_gaps`, every value has a maker."""
    first: dict[Held, tuple[int, int, Action]] = {}  # (position, worker, action) that makes it
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            for made in makes(action, worker, ownership):
                first.setdefault(made, (position, worker, action))
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            for need in needs(action, worker, ownership):
                if need in held:
                    continue
                made_at, maker, made_by = first.get(need, (-1, worker, action))
                rule = ""
                if made_at >= position and maker == worker:
                    rule = f"stands before {made_by}, which it requires"
                elif need not in first and name_gaps:
                    rule = f"requires {need[1]}, which nobody makes"
                if rule:
                    yield Violation(worker, position, str(action), rule)


def _crossed_transfers(program: Program, ownership: Ownership) -> Violations:
    """A worker receives from another in the order of the sends: two transfers of one pair must not cross."""
    numbers = DependencyIndex(program, ownership)
    longest = max(map(len, program.values()))
    sent: dict[int, int] = {}  # number of the value -> sender and position, in one
    received: dict[int, dict[int, int]] = {worker: {} for worker in program}  # worker -> the same number -> position
    for worker, actions in program.items():
        ends = dict.fromkeys(SEND_OPS, (sent, worker * longest)) | dict.fromkeys(RECEIVE_OPS, (received[worker], 0))
        lines: dict[tuple[int, Op, int], tuple[dict[int, int], int, int]] = {}
        for position, (stage, op, microbatch, pipeline) in enumerate(actions):
            if op in ends:
                line = lines.get((stage, op, pipeline))
                if line is None:
                    number = numbers.of((WIRE, carried(actions[position]))) - microbatch
                    line = lines[stage, op, pipeline] = (*ends[op], number)
                places, first, number = line
                places[number + microbatch] = first + position
    for worker, places in received.items():
        last: dict[int, int] = {}
        for number, position in places.items():
            at = sent[number]
            sender = at // longest
            if at < last.get(sender, -1):
                rule = f"crosses an earlier send of worker {sender}"
                yield Violation(worker, position, str(program[worker][position]), rule)
            last[sender] = at


# op -> the columns of the table about the place of an action in its worker's list
_PLACES = {
    op: (row.touches, row.closes, WeightForm.WHOLE if row.work else row.finds, row.leaves)
    for op, row in OP_TABLE.items()
    if row.touches or row.closes is not None or row.finds or row.work
}
_AS_READ = {WeightForm.WHOLE: "whole", WeightForm.IN_SHARDS: "in shards"}
_STASH_USERS = COMPUTE_OPS | STASH_OPS
_STASHED = (Kind.RESIDUAL, Kind.PENDING)
_HERE, _HOST, _USED = "on the device", "on the host", "used"


def _misplaced_stash(program: Program, ownership: Ownership) -> Violations:
    """An action that computes finds its residual on the device: behind 0OFFLOAD0, 0RELOAD0 stands before 0B0."""
    for worker, actions in program.items():
        places: dict[Value, str] = {}
        for position, action in enumerate(actions):
            if action.op not in _STASH_USERS:
                continue
            stash = stash_of(action, ownership.grid.slices)
            read = {value for _, value in needs(action, worker, ownership) if value.kind in _STASHED}
            wanted, after = (_HOST, _HERE) if action.op in STASH_OPS - LEAVE_OPS else (_HERE, _USED)
            for place in {places.get(each, _HERE) for each in ({stash} if action.op in STASH_OPS else read)} - {wanted}:
                yield Violation(worker, position, str(action), f"finds its residual {place}")
            places[stash] = _HOST if action.op in LEAVE_OPS else _HERE if action.op in FORWARD_OPS else after


def _taken_away(program: Program) -> Violations:
    """An action comes before its replica is closed for it, and finds the weights of its stage in the right form."""
    ops = {action.op for actions in program.values() for action in actions}
    first = WeightForm.IN_SHARDS if ops & SHARD_OPS else None
    for worker, actions in program.items():
        closed: dict[Slot, tuple[int, Action]] = {}  # up to which microbatch, and by which action
        forms: dict[int, WeightForm] = {}  # by stage: a worker gathers one for all pipelines in which it owns it
        for position, action in enumerate(actions):
            stage, op, microbatch, pipeline = action
            place = _PLACES.get(op)
            if place is None:
                continue
            touches, closes, finds, leaves = place
            slot = (pipeline, stage)
            reached = closed[slot][0] if slot in closed else -1
            if touches and reached >= (ALL if microbatch < 0 else microbatch):
                rule = f"comes too late behind {closed[slot][1]}"
                yield Violation(worker, position, str(action), rule)
            if closes is not None and (limit := closes if closes == ALL else microbatch + closes) > reached:
                closed[slot] = (limit, action)
            if first and finds and forms.get(stage, first) is not finds:
                rule = f"finds its stage {_AS_READ[forms.get(stage, first)]}"
                yield Violation(worker, position, str(action), rule)
            if leaves:
                forms[stage] = leaves
