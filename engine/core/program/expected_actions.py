"""What a whole step consists of: each action that must stand in its program, on the worker that must run it.

How often an accumulator is streamed is for the program to say: whoever sends it is met by those that take it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from engine.core.action import WHOLE_STAGE, Action, Op
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.build import Program

Mine = dict[tuple[int, Op, int], dict[int, bool]]  # stage, op, pipeline -> microbatch -> whether that stands there
Whole = Mapping[int, Mine]  # worker -> its actions of a step

_AS_THE_PROGRAM_SAYS = frozenset({Op.I, Op.W, Op.STREAM})


def whole_step(program: Program, ownership: Ownership, healing: Collection[tuple[int, Slot]]) -> Whole:
    """Returns every action that a step must have, by the worker that must run it.

    Of a backward it has the whole, or both parts where the owner has one of them and not the whole.
    """
    whole: dict[int, Mine] = {worker: {} for worker in ownership.workers()}
    for pipeline, stage in ownership.grid.slots():
        owner = ownership.owner(pipeline, stage)
        for op in _per_microbatch(pipeline, stage, ownership):
            whole[owner][stage, op, pipeline] = dict.fromkeys(range(ownership.grid.microbatches), False)
        if ownership.pipelines_of(owner, stage)[0] == pipeline:
            whole[owner][stage, Op.REDUCE_GRAD, pipeline] = {WHOLE_STAGE: False}
        for replica in ownership.replicas(pipeline, stage):
            for op in (Op.LOG, Op.COMMIT, Op.STEP):
                whole[replica][stage, op, pipeline] = {WHOLE_STAGE: False}
    for worker, (pipeline, stage) in sorted(healing):
        for each in (worker, ownership.owner(pipeline, stage)):
            whole[each][stage, Op.HEAL, pipeline] = {WHOLE_STAGE: False}
    for worker, actions in program.items():
        found = [action for action in actions if action.op in _AS_THE_PROGRAM_SAYS]
        if found:
            _split(whole.get(worker, {}), found, frozenset(actions))
        for action in found:
            if action.op is Op.STREAM and is_inside(action, ownership.grid):
                slot = (action.pipeline, action.stage)
                takers = [each for each in ownership.shadows_of(*slot) if (each, slot) not in healing]
                for each in (worker, *takers) if takers and worker == ownership.owner(*slot) else ():
                    whole[each].setdefault((action.stage, Op.STREAM, action.pipeline), {})[action.microbatch] = False
    return whole


def _split(mine: Mine, found: Collection[Action], present: Collection[Action]) -> None:
    for stage, op, microbatch, pipeline in found:
        back = mine.get((stage, Op.B, pipeline), {})
        if op is not Op.STREAM and microbatch in back and Action(stage, Op.B, microbatch, pipeline) not in present:
            del back[microbatch]
            for part in (Op.I, Op.W):
                mine.setdefault((stage, part, pipeline), {})[microbatch] = False


def _per_microbatch(pipeline: int, stage: int, ownership: Ownership) -> Iterator[Op]:
    yield from (Op.F, Op.B)
    owner = ownership.owner(pipeline, stage)
    if stage > 0 and ownership.owner(pipeline, stage - 1) != owner:
        yield from (Op.RECV_F, Op.SEND_B)
    if stage < ownership.grid.stages - 1 and ownership.owner(pipeline, stage + 1) != owner:
        yield from (Op.SEND_F, Op.RECV_B)


def is_inside(action: Action, grid: Grid) -> bool:
    """Says whether a grid has the stage, the pipeline and the microbatch of an action."""
    return action.stage < grid.stages and action.pipeline < grid.pipelines and action.microbatch < grid.microbatches
