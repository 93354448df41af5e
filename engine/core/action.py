"""Actions, their text form, and the table of ops: every rule that depends on the op of an action alone.

An action is one thing that a worker does: ``2F0`` is the forward of stage 2 on microbatch 0. Actions of pipeline 0 are
written as in torch's pipelining; actions of another pipeline carry its number: ``2F0@1``. Actions on a whole stage
have no microbatch: ``2STEP``. An action does not name its worker. In the list of a worker that shadows stage 3,
``3F0`` is a redundant forward, and ``3LOG`` receives the gradients that the owner's ``3LOG`` sends.

A new op is a member of `Op` and a row of `OP_TABLE`. The passes place it, and `runtime/worker/executor.py` runs it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from engine.core.errors import ScheduleError
from engine.core.op_row import ALL, By, OpRow, Shown, Stands, Term, WeightForm, Where, Work
from engine.core.value import Kind


class Op(StrEnum):
    """The kind of an action."""

    __hash__ = str.__hash__  # Enum's hash is written in Python and took a quarter of a dry run

    F = "F"
    REDO_F = "f"
    B = "B"
    I = "I"  # noqa: E741 - the field's name for it
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    STREAM = "STREAM"
    HAND = "HAND"
    UNSHARD = "UNSHARD"
    RESHARD = "RESHARD"
    HEAL = "HEAL"
    REDUCE_GRAD = "REDUCE_GRAD"
    LOG = "LOG"
    COMMIT = "COMMIT"
    STEP = "STEP"
    CHECKPOINT = "CHECKPOINT"


_INPUT = Term(Kind.ACTIVATION, stage=-1)
_OUTPUTS = (Term(Kind.ACTIVATION), Term(Kind.RESIDUAL))
_FOR_BACKWARD = (Term(Kind.RESIDUAL), Term(Kind.GRADIENT, stage=1))
_COUNTED_BEFORE = Term(Kind.COUNTED, microbatch=-1)
_ADDED_BEFORE = Term(Kind.ADDED, microbatch=-1)
_OWN_SUMS = (Term(Kind.ADDED, by=By.OWNER), Term(Kind.COUNTED, by=By.OWNER))
_OWN_REDUCED = (Term(Kind.REDUCED, by=By.OWNER), Term(Kind.REDUCED, Where.TIED, by=By.OWNER))
_SUMS_TAKEN = (Term(Kind.ADDED, by=By.SHADOW), Term(Kind.COUNTED, by=By.SHADOW))


def _transfer(about: str, value: Term, peer: int, *, sends: bool) -> OpRow:
    here, wire = (value,), (value._replace(at=Where.WIRE),)
    needs, makes = (here, wire) if sends else (wire, here)
    return OpRow(about, Stands.BORDER, Shown.TRANSFER if sends else Shown.WAITING, needs, makes, peer=peer)


OP_TABLE: Final[dict[Op, OpRow]] = {
    Op.F: OpRow(
        "forward",
        Stands.FORWARD,
        Shown.FORWARD,
        (_INPUT, _COUNTED_BEFORE),
        (*_OUTPUTS, Term(Kind.COUNTED)),
        Work.FORWARD,
        touches=True,
    ),
    Op.REDO_F: OpRow(
        "forward again: no buffer update, no loss",
        Stands.AGAIN,
        Shown.FORWARD,
        (_INPUT,),
        _OUTPUTS,
        Work.FORWARD,
        redoes=Op.F,
    ),
    Op.B: OpRow(
        "backward",
        Stands.BACKWARD,
        Shown.BACKWARD,
        (*_FOR_BACKWARD, _ADDED_BEFORE),
        (Term(Kind.GRADIENT), Term(Kind.ADDED)),
        Work.BACKWARD,
        closes=-1,
    ),
    Op.I: OpRow(
        "backward for the input",
        Stands.PART,
        Shown.PARTS,
        _FOR_BACKWARD,
        (Term(Kind.GRADIENT), Term(Kind.PENDING)),
        Work.FOR_INPUT,
        redoes=Op.B,
    ),
    Op.W: OpRow(
        "backward for the weights",
        Stands.PART,
        Shown.PARTS,
        (Term(Kind.PENDING), _ADDED_BEFORE),
        (Term(Kind.ADDED),),
        Work.FOR_WEIGHTS,
        closes=-1,
    ),
    Op.SEND_F: _transfer("send of an activation", Term(Kind.ACTIVATION), 1, sends=True),
    Op.RECV_F: _transfer("receipt of an activation", Term(Kind.ACTIVATION, stage=-1), -1, sends=False),
    Op.SEND_B: _transfer("send of a gradient", Term(Kind.GRADIENT), -1, sends=True),
    Op.RECV_B: _transfer("receipt of a gradient", Term(Kind.GRADIENT, stage=1), 1, sends=False),
    Op.STREAM: OpRow(
        "send of a slot's gradient accumulator to its shadows",
        Stands.STREAM,
        Shown.REDUCE,
        (*_OWN_SUMS, Term(Kind.STREAMED, Where.WIRE, by=By.SHADOW)),
        (*_SUMS_TAKEN, Term(Kind.STREAMED, Where.WIRE, by=By.OWNER)),
        touches=True,
        closes=0,
    ),
    Op.HAND: OpRow(
        "send of a slot's gradient accumulator to its next owner",
        Stands.HAND_OVER,
        Shown.REDUCE,
        (Term(Kind.ADDED, by=By.SHADOW), Term(Kind.STREAMED, Where.WIRE, by=By.OWNER)),
        (*_OWN_SUMS, Term(Kind.STREAMED, Where.WIRE, by=By.SHADOW)),
        touches=True,
        closes=0,
    ),
    Op.UNSHARD: OpRow(
        "all-gather of a stage's weights among its owners",
        Stands.ANY_TIMES,
        Shown.TRANSFER,
        meets=True,
        finds=WeightForm.IN_SHARDS,
        leaves=WeightForm.WHOLE,
    ),
    Op.RESHARD: OpRow(
        "release of the weights of other shards",
        Stands.ANY_TIMES,
        Shown.TRANSFER,
        finds=WeightForm.WHOLE,
        leaves=WeightForm.IN_SHARDS,
    ),
    Op.HEAL: OpRow(
        "send of a slot's state at the step boundary to a new shadow",
        Stands.HEALING,
        Shown.HEAL,
        (Term(Kind.STATE, Where.WIRE, by=By.SHADOW),),
        (Term(Kind.STATE, Where.WIRE, by=By.OWNER), Term(Kind.STATE, by=By.SHADOW)),
        touches=True,
    ),
    Op.REDUCE_GRAD: OpRow(
        "sum of a stage's gradients over the pipelines",
        Stands.STAGE,
        Shown.REDUCE,
        (Term(Kind.ADDED, microbatch=ALL), Term(Kind.COUNTED, microbatch=ALL)),
        (Term(Kind.REDUCED), Term(Kind.REDUCED, Where.WIRE)),
        meets=True,
        per_pipeline=True,
    ),
    Op.LOG: OpRow(
        "send of the inputs of a slot's optimizer step to its shadows",
        Stands.REPLICA,
        Shown.REDUCE,
        (*_OWN_REDUCED, Term(Kind.LOGGED, Where.WIRE, by=By.SHADOW)),
        (Term(Kind.LOGGED), Term(Kind.LOGGED, Where.WIRE, by=By.OWNER)),
        closes=ALL,
    ),
    Op.COMMIT: OpRow(
        "vote of a replica for the commit",
        Stands.REPLICA,
        Shown.COMMIT,
        (Term(Kind.LOGGED),),
        (Term(Kind.VOTED, Where.WIRE),),
    ),
    Op.STEP: OpRow(
        "optimizer step", Stands.REPLICA, Shown.COMMIT, (Term(Kind.VOTED, Where.VOTERS),), finds=WeightForm.IN_SHARDS
    ),
    Op.CHECKPOINT: OpRow("copy and write of a stage's state for a checkpoint", Stands.WRITER, Shown.COMMIT),
}


def ops_at(*stands: Stands) -> frozenset[Op]:
    """Returns the ops that stand in one of these places."""
    return frozenset(op for op, row in OP_TABLE.items() if row.stands in stands)


def ops_that_make(kind: Kind, at: Where = Where.HERE) -> frozenset[Op]:
    """Returns the ops that make a kind of value at a place, on some worker."""
    return frozenset(op for op, row in OP_TABLE.items() if any((kind, at) == term[:2] for term in row.makes))


COMPUTE_OPS = frozenset(op for op, row in OP_TABLE.items() if row.work)
FORWARD_OPS = ops_that_make(Kind.RESIDUAL)
ADDING_OPS = COMPUTE_OPS & ops_that_make(Kind.ADDED)
SHARD_OPS = ops_at(Stands.ANY_TIMES)  # the only ops that a step may repeat on a stage
STAGE_OPS = SHARD_OPS | ops_at(Stands.HEALING, Stands.STAGE, Stands.REPLICA, Stands.WRITER)
SEND_OPS = frozenset(op for op in ops_at(Stands.BORDER) if OP_TABLE[op].makes[0].at is Where.WIRE)
RECEIVE_OPS = ops_at(Stands.BORDER) - SEND_OPS

WHOLE_STAGE = -1

_new = tuple.__new__
_OPS = {op.value: op for op in Op}
_TEXT = re.compile(r"([0-9]{1,9})(f|[A-Z]+(?:_[A-Z]+)?)([0-9]{0,9})(?:@([0-9]{1,9}))?")


class Action(NamedTuple):
    """One action; `microbatch` is `WHOLE_STAGE` for ops on a whole stage.

    A named tuple, because a program may have 100,000 actions and a data class takes longer to create and to hash.
    """

    stage: int
    op: Op
    microbatch: int = WHOLE_STAGE
    pipeline: int = 0

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == WHOLE_STAGE else str(self.microbatch)
        pipeline = f"@{self.pipeline}" if self.pipeline else ""
        return f"{self.stage}{self.op.value}{microbatch}{pipeline}"


Program = Mapping[int, tuple[Action, ...]]  # the actions of each worker, in order


def make_action(stage: int, op: Op, microbatch: int, pipeline: int = 0) -> Action:
    """Returns an action in half the time of `Action(...)`: a long program creates a million actions."""
    return _new(Action, (stage, op, microbatch, pipeline))


@lru_cache(maxsize=1 << 12)  # a run records the same few texts again in every step
def parse_action(text: str) -> Action:
    """Returns the action that `text` spells; raises ScheduleError if `text` is no action."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or match[2] not in _OPS:
        raise ScheduleError(f"expected an action such as 2F0 or 1SEND_B3, found {text!r}")
    op = _OPS[match[2]]
    if (op in STAGE_OPS) == bool(match[3]):
        form = "no microbatch" if op in STAGE_OPS else "a microbatch"
        raise ScheduleError(f"expected {form} after {op.value}, found {text!r}")
    microbatch = int(match[3]) if match[3] else WHOLE_STAGE
    return Action(int(match[1]), op, microbatch, int(match[4] or 0))
