"""The happens-before rule: the values that an action needs and makes, and their places, read off the table of ops.

Verification, the dry run, the passes, the routes of transfers, the recovery planner and the tests all ask `needs` and
`makes`. No other module states the rule again.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from engine.core.action import OP_TABLE, SEND_OPS, Action, Op
from engine.core.op_row import ALL, By, OpRow, Stands, Term, Where
from engine.core.ownership import Ownership
from engine.core.value import WIRE, Held, Kind, Value

_new = tuple.__new__


_Flat = tuple[Kind, bool, int, int]  # kind, whether it is here, stages further, microbatches further


class _Terms(NamedTuple):
    """The terms of one op, by the role of the worker; `uneven` if a term stands for other values than its own one."""

    of_owner: tuple[_Flat, ...]
    of_shadow: tuple[_Flat, ...]
    uneven: tuple[Term, ...] = ()


def needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """Returns the values that must be there before `worker` may run `action`, each with its place."""
    return _values(_NEEDS[action.op], action, worker, ownership)


def makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """Returns the values that are there after `worker` has run `action`, each with its place."""
    return _values(_MAKES[action.op], action, worker, ownership)


def needed(action: Action, kind: Kind) -> Value:
    """Returns the value of a kind that an action needs, or would need if the pipeline went on there."""
    stage, op, microbatch, pipeline = action
    further = next(term.stage for term in OP_TABLE[op].needs if term.kind is kind)
    return Value(kind, pipeline, stage + further, microbatch)


def carried(action: Action) -> Value:
    """Returns the value that a SEND or RECV carries."""
    kind, further = _CARRIES[action.op]
    return Value(kind, action.pipeline, action.stage + further, action.microbatch)


def rendezvous(action: Action, worker: int, ownership: Ownership) -> tuple[tuple[int, Action], ...]:
    """Returns the actions of other workers that run together with this one: each waits until the others have begun.

    A worker that owns a stage in several pipelines runs the action once, with the first of these pipelines.
    """
    if not OP_TABLE[action.op].meets:
        return ()
    return tuple(
        (other, Action(action.stage, action.op, pipeline=ownership.pipelines_of(other, action.stage)[0]))
        for other in ownership.owners_of(action.stage)
        if other != worker
    )


def _values(of: _Terms, action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    terms, of_shadow, uneven = of
    if uneven:
        return tuple(_uneven(uneven, action, worker, ownership))
    stage, _, microbatch, pipeline = action
    if of_shadow is not terms and ownership.owner(pipeline, stage) != worker:
        terms = of_shadow
    found: list[Held] = []
    for kind, is_here, further, later in terms:
        if (not later or microbatch) and (not further or 0 <= stage + further < ownership.grid.stages):
            value = _new(Value, (kind, pipeline, stage + further, microbatch + later))
            found.append((worker if is_here else WIRE, value))
    return tuple(found)


def _uneven(terms: tuple[Term, ...], action: Action, worker: int, ownership: Ownership) -> Iterator[Held]:
    stage, op, _, pipeline = action
    other_role = By.SHADOW if ownership.owner(pipeline, stage) == worker else By.OWNER
    for each in ownership.pipelines_of(worker, stage) if OP_TABLE[op].per_pipeline else (pipeline,):
        for kind, at, _, later, by in terms:
            if by is other_role:
                continue
            if at is Where.TIED:
                yield from _tied(kind, action, worker, ownership)
            elif at is Where.VOTERS:
                yield from _all_votes(ownership)
            else:
                index = worker if kind is Kind.VOTED else ownership.grid.microbatches - 1 if later == ALL else -1
                yield worker if at is Where.HERE else WIRE, Value(kind, each, stage, index)


def _tied(kind: Kind, action: Action, worker: int, ownership: Ownership) -> list[Held]:
    stage, _, _, pipeline = action
    others = ownership.grid.tied_to(stage)
    return [
        (worker if ownership.owner(pipeline, other) == worker else WIRE, Value(kind, pipeline, other))
        for other in others
    ]


@lru_cache(maxsize=8)  # the same for every STEP
def _all_votes(ownership: Ownership) -> tuple[Held, ...]:
    return tuple(
        (WIRE, Value(Kind.VOTED, *slot, replica))
        for slot in ownership.grid.slots()
        for replica in ownership.replicas(*slot)
    )


def _by_role(terms: tuple[Term, ...], row: OpRow) -> _Terms:
    if row.per_pipeline or any(each.at in (Where.TIED, Where.VOTERS) or each.kind is Kind.VOTED for each in terms):
        return _Terms((), (), terms)
    owner, shadow = (
        tuple((each.kind, each.at is Where.HERE, each.stage, each.microbatch) for each in terms if each.by is not other)
        for other in (By.SHADOW, By.OWNER)
    )
    return _Terms(owner, owner if owner == shadow else shadow)


_NEEDS = {op: _by_role(row.needs, row) for op, row in OP_TABLE.items()}
_MAKES = {op: _by_role(row.makes, row) for op, row in OP_TABLE.items()}
_CARRIES = {op: (row.needs[0].kind, row.needs[0].stage) for op, row in OP_TABLE.items() if row.stands is Stands.BORDER}
SENDS: dict[Kind, Op] = {_CARRIES[op][0]: op for op in SEND_OPS}  # by the kind that they carry
RECEIVES: dict[Kind, Op] = {_CARRIES[op][0]: op for op in _CARRIES.keys() - SEND_OPS}
