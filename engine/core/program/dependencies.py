"""The happens-before rule, written once: what each action needs, what it makes, and where.

Verification, the dry run, the passes, the routes of transfers, the recovery planner and the tests all ask `needs` and
`makes`; nobody states the rule again. Values, not actions, are needed: it does not matter who made a value, or whether
it was made before a failure. A value is held by a worker or is on its way to whoever takes it (`WIRE`). What is
updated in place is a counter: `COUNTED` and `ADDED` with index m say that the first m+1 microbatches are in.
"""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple

from engine.core.action import WHOLE_STAGE, Action, Op
from engine.core.ownership import Ownership


class Kind(StrEnum):
    """What a value is."""

    __hash__ = str.__hash__  # that of Enum is written in Python: a quarter of the time of a dry run

    ACTIVATION = "activation"  # what a forward hands on
    RESIDUAL = "residual"  # what a forward keeps for its backward; it cannot be sent
    GRADIENT = "gradient"  # of the loss by the input of a stage: what a backward hands on
    PENDING = "pending"  # what a backward for the input keeps for the one for the weights
    COUNTED = "counted"  # forwards that the buffers have seen
    ADDED = "added"  # backwards that the accumulator has seen
    STREAMED = "streamed"  # an accumulator with its counters, and the buffers as they were that far
    STATE = "state"  # weights, optimizer state and buffers as of the step boundary
    REDUCED = "reduced"  # the gradient of a stage over all pipelines, with their buffers and losses
    LOGGED = "logged"  # all that the optimizer step of a slot reads
    VOTED = "voted"  # a replica's word that it holds what is logged; its index is the worker


class Value(NamedTuple):
    """A value of one step; `index` is a microbatch, or nothing."""

    kind: Kind
    pipeline: int
    stage: int
    index: int = WHOLE_STAGE  # type: ignore[assignment] # tuple's method of that name is of no use here

    def __str__(self) -> str:
        numbered = "worker" if self.kind is Kind.VOTED else "microbatch"
        index = "" if self.index == WHOLE_STAGE else f" {numbered} {self.index}"
        pipeline = f" pipeline {self.pipeline}" if self.pipeline else ""
        return f"{self.kind} of stage {self.stage}{index}{pipeline}"


WIRE = -1
Held = tuple[int, Value]  # (worker, or WIRE, value)


def needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """Returns what must be there, and where, before `worker` may run `action`."""
    return _NEEDS[action.op](action, worker, ownership)


def makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """Returns what is there, and where, after `worker` has run `action`."""
    return _MAKES[action.op](action, worker, ownership)


def rendezvous(action: Action, worker: int, ownership: Ownership) -> tuple[tuple[int, Action], ...]:
    """Returns the actions of other workers that run together with this one: each waits until the others have begun.

    Only the reduction over pipelines and what puts shards together are of this kind. A worker that owns a stage in
    several pipelines reduces it once, with the action of the first of them.
    """
    if action.op not in (Op.REDUCE_GRAD, Op.UNSHARD):
        return ()
    return tuple(
        (other, Action(action.stage, action.op, pipeline=ownership.pipelines_of(other, action.stage)[0]))
        for other in ownership.owners_of(action.stage)
        if other != worker
    )


def _none(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return ()


def _forward_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    stage, op, microbatch, pipeline = action
    found = []
    if stage > 0:
        found.append((worker, Value(Kind.ACTIVATION, pipeline, stage - 1, microbatch)))
    if microbatch > 0 and op is Op.F:
        found.append((worker, Value(Kind.COUNTED, pipeline, stage, microbatch - 1)))
    return tuple(found)


def _forward_makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    stage, op, microbatch, pipeline = action
    made = (
        (worker, Value(Kind.ACTIVATION, pipeline, stage, microbatch)),
        (worker, Value(Kind.RESIDUAL, pipeline, stage, microbatch)),
    )
    return (*made, (worker, Value(Kind.COUNTED, pipeline, stage, microbatch))) if op is Op.F else made


def _backward_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    stage, op, microbatch, pipeline = action
    found = [(worker, Value(Kind.RESIDUAL, pipeline, stage, microbatch))]
    if stage < ownership.grid.stages - 1:
        found.append((worker, Value(Kind.GRADIENT, pipeline, stage + 1, microbatch)))
    if microbatch > 0 and op is Op.B:
        found.append((worker, Value(Kind.ADDED, pipeline, stage, microbatch - 1)))
    return tuple(found)


def _backward_makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    stage, op, microbatch, pipeline = action
    left = Kind.ADDED if op is Op.B else Kind.PENDING
    return (
        (worker, Value(Kind.GRADIENT, pipeline, stage, microbatch)),
        (worker, Value(left, pipeline, stage, microbatch)),
    )


def _weights_need(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    stage, _, microbatch, pipeline = action
    pending = (worker, Value(Kind.PENDING, pipeline, stage, microbatch))
    return (pending, (worker, Value(Kind.ADDED, pipeline, stage, microbatch - 1))) if microbatch > 0 else (pending,)


def _weights_make(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return ((worker, Value(Kind.ADDED, action.pipeline, action.stage, action.microbatch)),)


def _stream_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """The owner sends what it has added up; a shadow takes it."""
    return _streamed(action, worker) if _is_owner(action, worker, ownership) else _on_the_wire(action)


def _stream_makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """A shadow that has taken it has every microbatch so far in its accumulator and its buffers, and no other."""
    return _on_the_wire(action) if _is_owner(action, worker, ownership) else _streamed(action, worker)


def _streamed(action: Action, worker: int) -> tuple[Held, ...]:
    place = (action.pipeline, action.stage, action.microbatch)
    return ((worker, Value(Kind.ADDED, *place)), (worker, Value(Kind.COUNTED, *place)))


def _on_the_wire(action: Action) -> tuple[Held, ...]:
    return ((WIRE, Value(Kind.STREAMED, action.pipeline, action.stage, action.microbatch)),)


# op of a transfer -> what it carries, and whose it is, counted from the stage that the action names
_CARRIES = {
    Op.SEND_F: (Kind.ACTIVATION, 0),
    Op.RECV_F: (Kind.ACTIVATION, -1),
    Op.SEND_B: (Kind.GRADIENT, 0),
    Op.RECV_B: (Kind.GRADIENT, 1),
}


def carried(action: Action) -> Value:
    """Returns what a SEND or RECV carries."""
    kind, offset = _CARRIES[action.op]
    return Value(kind, action.pipeline, action.stage + offset, action.microbatch)


def _carried_here(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return ((worker, carried(action)),)


def _carried_on_the_wire(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return ((WIRE, carried(action)),)


def _reduce_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    last = ownership.grid.microbatches - 1
    return tuple(
        (worker, Value(kind, pipeline, action.stage, last))
        for pipeline in ownership.pipelines_of(worker, action.stage)
        for kind in (Kind.ADDED, Kind.COUNTED)
    )


def _reduce_makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return tuple(
        (place, Value(Kind.REDUCED, pipeline, action.stage))
        for pipeline in ownership.pipelines_of(worker, action.stage)
        for place in (worker, WIRE)
    )


def _whole(kind: Kind, action: Action) -> Value:
    return Value(kind, action.pipeline, action.stage)


def _is_owner(action: Action, worker: int, ownership: Ownership) -> bool:
    return ownership.owner(action.pipeline, action.stage) == worker


def _log_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    """The owner needs the gradients of tied stages too; a shadow what the owner has put together."""
    if not _is_owner(action, worker, ownership):
        return ((WIRE, _whole(Kind.LOGGED, action)),)
    tied = [
        (
            worker if ownership.owner(action.pipeline, stage) == worker else WIRE,
            Value(Kind.REDUCED, action.pipeline, stage),
        )
        for stage in ownership.grid.tied_to(action.stage)
    ]
    return ((worker, _whole(Kind.REDUCED, action)), *tied)


def _log_makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    here = (worker, _whole(Kind.LOGGED, action))
    return (here, (WIRE, _whole(Kind.LOGGED, action))) if _is_owner(action, worker, ownership) else (here,)


def _heal_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return () if _is_owner(action, worker, ownership) else ((WIRE, _whole(Kind.STATE, action)),)


def _heal_makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return ((WIRE if _is_owner(action, worker, ownership) else worker, _whole(Kind.STATE, action)),)


def _commit_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return ((worker, _whole(Kind.LOGGED, action)),)


def _commit_makes(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return ((WIRE, Value(Kind.VOTED, action.pipeline, action.stage, worker)),)


def _step_needs(action: Action, worker: int, ownership: Ownership) -> tuple[Held, ...]:
    return _all_votes(ownership)


@lru_cache(maxsize=8)  # the same for every STEP
def _all_votes(ownership: Ownership) -> tuple[Held, ...]:
    return tuple(
        (WIRE, Value(Kind.VOTED, *slot, replica))
        for slot in ownership.grid.slots()
        for replica in ownership.replicas(*slot)
    )


_NEEDS = {
    Op.F: _forward_needs,
    Op.REDO_F: _forward_needs,
    Op.B: _backward_needs,
    Op.I: _backward_needs,
    Op.W: _weights_need,
    Op.SEND_F: _carried_here,
    Op.SEND_B: _carried_here,
    Op.RECV_F: _carried_on_the_wire,
    Op.RECV_B: _carried_on_the_wire,
    Op.STREAM: _stream_needs,
    Op.UNSHARD: _none,
    Op.RESHARD: _none,
    Op.HEAL: _heal_needs,
    Op.REDUCE_GRAD: _reduce_needs,
    Op.LOG: _log_needs,
    Op.COMMIT: _commit_needs,
    Op.STEP: _step_needs,
}
_MAKES = {
    Op.F: _forward_makes,
    Op.REDO_F: _forward_makes,
    Op.B: _backward_makes,
    Op.I: _backward_makes,
    Op.W: _weights_make,
    Op.SEND_F: _carried_on_the_wire,
    Op.SEND_B: _carried_on_the_wire,
    Op.RECV_F: _carried_here,
    Op.RECV_B: _carried_here,
    Op.STREAM: _stream_makes,
    Op.UNSHARD: _none,
    Op.RESHARD: _none,
    Op.HEAL: _heal_makes,
    Op.REDUCE_GRAD: _reduce_makes,
    Op.LOG: _log_makes,
    Op.COMMIT: _commit_makes,
    Op.STEP: _none,
}
