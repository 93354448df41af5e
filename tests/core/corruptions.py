"""Ways to spoil the program of a step, each a kind of mistake that a verifier must find."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from engine.core.action import SHARD_OPS, WHOLE_STAGE, Action, Op
from engine.core.ownership import Ownership

Lines = dict[int, list[Action]]
Spoil = Callable[[Lines, Ownership, random.Random], bool]  # changes the lines; says whether it found where


def _places(lines: Lines, *ops: Op) -> list[tuple[int, int]]:
    return [(worker, at) for worker, line in lines.items() for at, action in enumerate(line) if action.op in ops]


def _drop(op: Op, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    if places := _places(lines, op):
        worker, at = order.choice(places)
        del lines[worker][at]
    return bool(places)


def _repeat(op: Op, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    if places := _places(lines, op):
        worker, at = order.choice(places)
        lines[worker].insert(order.randint(at, len(lines[worker])), lines[worker][at])
    return bool(places)


def _turn_into(before: Op, after: Op, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    if places := _places(lines, before):
        worker, at = order.choice(places)
        lines[worker][at] = lines[worker][at]._replace(op=after)
    return bool(places)


def _behind(first: Op, then: Op, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    """Puts an action right behind another of the same slot (and microbatch, if both have one) that needs it."""
    pairs = [
        (worker, one, other)
        for worker, line in lines.items()
        for one, sooner in enumerate(line)
        for other, later in enumerate(line)
        if one < other and (sooner.op, later.op) == (first, then) and _belong_together(sooner, later)
    ]
    if pairs:
        worker, one, other = order.choice(pairs)
        lines[worker].insert(other, lines[worker].pop(one))
    return bool(pairs)


def _belong_together(one: Action, other: Action) -> bool:
    same = one.microbatch == other.microbatch or WHOLE_STAGE in (one.microbatch, other.microbatch)
    return same and (one.stage, one.pipeline) == (other.stage, other.pipeline)


def _exchange(op: Op, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    """Exchanges two microbatches of one slot."""
    pairs = [
        (worker, one, other)
        for worker, line in lines.items()
        for one, sooner in enumerate(line)
        for other, later in enumerate(line)
        if one < other and sooner.op is later.op is op and sooner._replace(microbatch=later.microbatch) == later
    ]
    if pairs:
        worker, one, other = order.choice(pairs)
        line = lines[worker]
        line[one], line[other] = line[other], line[one]
    return bool(pairs)


def _renumber(field: str, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    """Names a stage, a microbatch or a pipeline beyond the last."""
    grid = ownership.grid
    beyond = {"stage": grid.stages, "microbatch": grid.microbatches, "pipeline": grid.pipelines}[field]
    worker, at = order.choice(_places(lines, Op.F, Op.B, Op.I))
    lines[worker][at] = lines[worker][at]._replace(**{field: beyond})  # type: ignore[arg-type]
    return True


def _to_another(op: Op, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    """Gives an action of an owner to another worker, at a place of its choice."""
    places = [
        (worker, at)
        for worker, at in _places(lines, op)
        if ownership.owner(lines[worker][at].pipeline, lines[worker][at].stage) == worker
    ]
    if places and len(lines) > 1:
        worker, at = order.choice(places)
        other = order.choice([each for each in lines if each != worker])
        lines[other].insert(order.randint(0, len(lines[other])), lines[worker].pop(at))
        return True
    return False


def _to_the_front(op: Op, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    if places := [(worker, at) for worker, at in _places(lines, op) if at > 0]:
        worker, at = order.choice(places)
        lines[worker].insert(0, lines[worker].pop(at))
    return bool(places)


def _add(action: Action, lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    worker = ownership.owner(0, 0)
    lines[worker].insert(order.randint(0, len(lines[worker])), action)
    return True


def _forget_a_worker(lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    lines[order.choice(sorted(lines))].clear()
    return True


def _exchange_workers(lines: Lines, ownership: Ownership, order: random.Random) -> bool:
    if len(lines) > 1:
        one, other = order.sample(sorted(lines), 2)
        lines[one], lines[other] = lines[other], lines[one]
    return len(lines) > 1


_IN_A_STEP = [op for op in Op if op not in (Op.REDO_F, Op.HEAL, Op.CHECKPOINT, *SHARD_OPS)]
_NEEDED = [
    *((Op.F, Op.B), (Op.F, Op.I), (Op.I, Op.W), (Op.F, Op.SEND_F), (Op.B, Op.SEND_B), (Op.I, Op.SEND_B)),
    *((Op.RECV_F, Op.F), (Op.RECV_B, Op.B), (Op.RECV_B, Op.I), (Op.B, Op.REDUCE_GRAD), (Op.W, Op.REDUCE_GRAD)),
    *((Op.REDUCE_GRAD, Op.LOG), (Op.LOG, Op.COMMIT), (Op.COMMIT, Op.STEP), (Op.F, Op.LOG)),
    *((Op.B, Op.STREAM), (Op.W, Op.STREAM), (Op.STREAM, Op.LOG)),
]
CORRUPTIONS: dict[str, Spoil] = {
    **{f"{op} is missing": partial(_drop, op) for op in _IN_A_STEP},
    **{f"{op} stands twice": partial(_repeat, op) for op in _IN_A_STEP},
    **{
        f"{op} is another worker's": partial(_to_another, op)
        for op in (Op.F, Op.B, Op.I, Op.W, Op.SEND_F, Op.RECV_B, Op.STREAM)
    },
    **{f"{first} behind {then}": partial(_behind, first, then) for first, then in _NEEDED},
    **{f"{op} out of order": partial(_exchange, op) for op in (Op.F, Op.B, Op.W, Op.STREAM)},
    **{f"{op} at the front": partial(_to_the_front, op) for op in (Op.RECV_B, Op.STEP, Op.COMMIT)},
    **{f"no such {field}": partial(_renumber, field) for field in ("stage", "microbatch", "pipeline")},
    "F turned into f": partial(_turn_into, Op.F, Op.REDO_F),
    "B turned into I": partial(_turn_into, Op.B, Op.I),
    "B turned into W": partial(_turn_into, Op.B, Op.W),
    "I turned into B": partial(_turn_into, Op.I, Op.B),
    "W turned into B": partial(_turn_into, Op.W, Op.B),
    "SEND turned into RECV": partial(_turn_into, Op.SEND_F, Op.RECV_F),
    "HEAL for nobody": partial(_add, Action(0, Op.HEAL)),
    "f in a whole step": partial(_add, Action(0, Op.REDO_F, 0)),
    "a worker does nothing": _forget_a_worker,
    "two workers exchanged": _exchange_workers,
}
