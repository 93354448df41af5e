"""The actions that a step must have, each on the worker that must run it, read off the table of ops.

A whole step has every forward and backward; the plan of a recovery has the rest of one:

    whole step   0F0 0F1 0B0 0B1  ...           every microbatch, all transfers
    plan         0F1 0B0 0B1      ...           worker 0 had counted microbatch 0 and added none
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from engine.core.action import OP_TABLE, RECEIVE_OPS, SEND_OPS, WHOLE_STAGE, Action, Op, Program, ops_at
from engine.core.op_row import Stands
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.dependencies import makes
from engine.core.program.remaining_tasks import progress_of
from engine.core.value import Held, Kind, Value

Mine = dict[tuple[int, Op, int], dict[int, bool]]  # stage, op, pipeline -> microbatch -> whether it stands there
ExpectedActions = Mapping[int, Mine]  # worker -> its actions of a step

_AT_SHADOWS_TOO = frozenset({Stands.STREAM, Stands.REPLICA, Stands.HEALING})
_PARTS = ops_at(Stands.PART)
_STREAMS = ops_at(Stands.STREAM)
_HANDS = ops_at(Stands.HAND_OVER)
_HEALS = ops_at(Stands.HEALING)
_COMPUTES = {Op.F: Kind.COUNTED, Op.B: Kind.ADDED}  # with the counter of those that are done
_TRANSFERS = tuple((op, row.peer) for op, row in OP_TABLE.items() if row.stands is Stands.BORDER)
_ONCE = tuple(op for op, row in OP_TABLE.items() if row.stands is Stands.STAGE)
_OF_REPLICAS = tuple(op for op, row in OP_TABLE.items() if row.stands is Stands.REPLICA)


def expected_actions(
    program: Program, ownership: Ownership, healing: Collection[tuple[int, Slot]], held: Collection[Held] | None = None
) -> ExpectedActions:
    """Returns the actions that a whole step must have or, if `held` is given, the rest of a step.

    A slot has its backwards whole, or in both parts if the owner has one of them. The program chooses the streams: a
    stream that the owner sends must be taken by all shadows. Transfers are expected in a whole step only.
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
        for each in (worker, ownership.owner(pipeline, stage)):
            whole[each].update({(stage, op, pipeline): {WHOLE_STAGE: False} for op in _HEALS})
    for worker, actions in program.items():
        found = [action for action in actions if action.op in _PARTS]
        if found:
            _split(whole.get(worker, {}), found, frozenset(actions), frozenset(v for w, v in there if w == worker))
        for action in actions:
            if action.op in _STREAMS and _is_inside(action, ownership.grid):
                _stream(whole, worker, action, ownership, healing)
            if _gives(action, worker, ownership, there):
                _hand(whole, worker, action, ownership)
    return whole


def _gives(action: Action, worker: int, ownership: Ownership, there: Collection[Held]) -> bool:
    """Says whether the action hands an accumulator that `worker` holds at the start to the owner of its slot."""
    stage, op, microbatch, pipeline = action
    if op not in _HANDS or not _is_inside(action, ownership.grid) or ownership.owner(pipeline, stage) == worker:
        return False
    return (worker, Value(Kind.ADDED, pipeline, stage, microbatch)) in there


def _progress(program: Program, ownership: Ownership, there: Collection[Held]) -> dict[tuple[Kind, int, int], int]:
    """Returns the microbatches that owners have counted and added, accumulators that are handed to them included."""
    progress = progress_of(ownership, there, ())
    for worker, actions in program.items():
        for action in actions:
            if _gives(action, worker, ownership, there):
                for kind in _COMPUTES.values():
                    at = (kind, action.pipeline, action.stage)
                    progress[at] = max(progress.get(at, 0), action.microbatch + 1)
    return progress


def _is_done(slot: Slot, ownership: Ownership, there: Collection[Held]) -> bool:
    """Says whether the owner of a slot has reduced its gradient."""
    return (ownership.owner(*slot), Value(Kind.REDUCED, *slot)) in there


def _transfers(slot: Slot, ownership: Ownership) -> Iterator[Op]:
    pipeline, stage = slot
    for op, peer in _TRANSFERS:
        if 0 <= stage + peer < ownership.grid.stages and ownership.owner(pipeline, stage + peer) != ownership.owner(
            *slot
        ):
            yield op


def _once_each(slot: Slot, ownership: Ownership) -> Iterator[tuple[Op, int]]:
    """Yields the ops on a whole slot and the workers that run them."""
    pipeline, stage = slot
    owner = ownership.owner(*slot)
    if ownership.pipelines_of(owner, stage)[0] == pipeline:
        yield from ((op, owner) for op in _ONCE)
    for replica in ownership.replicas(*slot):
        yield from ((op, replica) for op in _OF_REPLICAS)


def _split(mine: Mine, found: Collection[Action], present: Collection[Action], held: Collection[Value]) -> None:
    """Expects both parts of a backward in place of the whole where a part stands; the first may be held."""
    for stage, _, microbatch, pipeline in found:
        back = mine.get((stage, Op.B, pipeline), {})
        if microbatch in back and Action(stage, Op.B, microbatch, pipeline) not in present:
            del back[microbatch]
            is_half_done = Value(Kind.PENDING, pipeline, stage, microbatch) in held
            for part in (Op.W,) if is_half_done else (Op.I, Op.W):
                mine.setdefault((stage, part, pipeline), {})[microbatch] = False


def _stream(
    whole: ExpectedActions, worker: int, action: Action, ownership: Ownership, healing: Collection[tuple[int, Slot]]
) -> None:
    stage, op, microbatch, pipeline = action
    slot = (pipeline, stage)
    takers = [each for each in ownership.shadows_of(*slot) if (each, slot) not in healing]
    if takers and worker == ownership.owner(*slot):
        for each in (worker, *takers):
            whole[each].setdefault((stage, op, pipeline), {})[microbatch] = False


def _hand(whole: dict[int, Mine], worker: int, action: Action, ownership: Ownership) -> None:
    stage, op, microbatch, pipeline = action
    for each in (worker, ownership.owner(pipeline, stage)):
        whole.setdefault(each, {}).setdefault((stage, op, pipeline), {})[microbatch] = False


def _is_inside(action: Action, grid: Grid) -> bool:
    """Says whether a grid has the stage, the pipeline and the microbatch of an action."""
    return action.stage < grid.stages and action.pipeline < grid.pipelines and action.microbatch < grid.microbatches


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
        if not _is_inside(action, grid):
            return f"outside the grid of {grid.pipelines} x {grid.stages} slots and {grid.microbatches} microbatches"
        owner = self._ownership.owner(pipeline, stage)
        is_shadow = worker in self._ownership.shadows_of(pipeline, stage)
        if row.stands is Stands.WRITER or (row.stands is Stands.AGAIN and not self._is_plan):
            return "no part of a whole step"
        if row.touches and row.stands is not Stands.HEALING and (worker, (pipeline, stage)) in self._healing:
            return "has no whole replica of its slot yet"
        sends = self._is_plan and op in SEND_OPS  # any worker may send a value that it holds
        forwards = is_shadow and row.stands is Stands.FORWARD and not self._is_plan
        if sends or forwards or (worker == owner and row.stands is Stands.ANY_TIMES):
            return ""
        if worker != owner and not (is_shadow and row.stands in _AT_SHADOWS_TOO):
            return f"belongs to worker {owner}, the owner of its slot"
        return self._in_plan(action) if self._is_plan else _WHY_NOT.get(row.stands, NO_PEER)

    def _in_plan(self, action: Action) -> str:
        """Returns the rule that an action of its slot's owner breaks in a plan, if the rest of the step lacks it."""
        stage, op, microbatch, pipeline = action
        counted = microbatch < self._progress.get((Kind.COUNTED, pipeline, stage), 0)
        if op in RECEIVE_OPS or op is Op.I or (op is Op.REDO_F and counted):
            return ""
        if op is Op.REDO_F:
            return "runs a forward again that has not been counted"
        if op is Op.F and not counted and _is_done((pipeline, stage), self._ownership, self._there):
            return ""  # it updates the buffers, which the activations of later microbatches depend on
        return _WHY_NOT_IN_PLAN.get(OP_TABLE[op].stands, "is no part of the rest of the step")


_IN_ANOTHER_FORM = "stands beside a backward of this microbatch in another form"
NO_PEER = "there is no other worker at the other end"
_WHY_NOT = {
    Stands.BACKWARD: _IN_ANOTHER_FORM,
    Stands.PART: _IN_ANOTHER_FORM,
    Stands.STAGE: "the worker reduces this stage with the first of its pipelines",
    Stands.HEALING: "heals nobody",
}
_WHY_NOT_IN_PLAN = {
    Stands.FORWARD: "counts a microbatch that has been counted",
    Stands.BACKWARD: "adds a microbatch that has been added, or stands beside a backward in another form",
    Stands.PART: "adds a microbatch that has been added, or stands beside a backward in another form",
}
