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
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from functools import lru_cache
from typing import Final, NamedTuple

from engine.core.errors import ScheduleError
from engine.core.value import Kind

# The columns of the table of ops in `action.py`: the rules that an op has.
#
# `needs` and `makes` are the happens-before rule of pipeline parallelism: the forward of a stage needs the output of
# the stage before, the backward needs the output of the backward of the stage behind.
#
#     worker 0   0F0 0SEND_F0                               0RECV_B0 0B0
#     worker 1                1RECV_F0 1F0 1B0 1SEND_B0


class StepPosition(Enum):
    """Where the program of a step has an op."""

    FORWARD = auto()  # at the owner of each slot for each microbatch; a shadow may run it too
    BACKWARD = auto()  # at the owner of each slot for each microbatch, unless its parts stand there
    PART = auto()  # at the owner of the slot, both parts in place of a backward
    AGAIN = auto()  # at the owner of the slot, in the plan of a recovery only
    BORDER = auto()  # for each microbatch, at the owner of the slot if the stage `peer` further is on another worker
    STREAM = auto()  # at the owner of the slot and its shadows, for the microbatches that the program chooses
    STASH = auto()  # where a forward of the slot stands, for the microbatches that the program chooses
    HAND_OVER = auto()  # in a plan only: at the owner of the slot, and at the member that has done more of it
    ANY_TIMES = auto()  # at the owner of the slot, as often as the program chooses
    STAGE = auto()  # at each owner of a stage, with the first of its pipelines
    REPLICA = auto()  # at the owner of each slot and at its shadows
    HEALING = auto()  # at each shadow that is healing, and at the owner of its slot
    WRITER = auto()  # in no program: behind the optimizer step of a step that is kept, at the writer of the stage


class Work(Enum):
    """The cost of an op that computes."""

    FORWARD = auto()
    BACKWARD = auto()
    FOR_INPUT = auto()  # a backward without the part for the weights
    FOR_WEIGHTS = auto()


class LegendEntry(StrEnum):
    """The entry in the legend of a timeline."""

    FORWARD = "forward"
    BACKWARD = "backward"
    PARTS = "backward in parts"
    TRANSFER = "transfer"
    REDUCE = "reduce, log"
    COMMIT = "commit, step"
    HEAL = "heal"
    WAITING = "waiting"


class WeightForm(Enum):
    """The form of a stage's weights where the job shards them."""

    WHOLE = auto()
    IN_SHARDS = auto()


class Where(Enum):
    """The place of a value that an action needs or makes."""

    HERE = auto()  # at the worker that runs the action
    WIRE = auto()
    TIED = auto()  # one value for each tied stage: at the worker if it owns that stage too, else on the wire
    VOTERS = auto()  # one value for each replica of each slot, on the wire


class By(Enum):
    """The workers to which a term applies."""

    ALL = auto()
    OWNER = auto()
    SHADOW = auto()


class Slicing(Enum):
    """What the slices of a microbatch change about a term."""

    WITHIN = auto()  # only between slices of one microbatch: the first slice drops a term about the one before
    TURNED = auto()  # of the same slice, which forwards and backwards number in opposite directions


class Term(NamedTuple):
    """A value that an action needs or makes, relative to the action's stage and microbatch."""

    kind: Kind
    at: Where = Where.HERE
    stage: int = 0  # further; a stage outside the pipeline drops the term
    microbatch: int = 0  # further; a microbatch before the first drops the term
    by: By = By.ALL
    slicing: Slicing | None = None


ALL: Final = 1 << 30  # more microbatches than a step has; as a term's microbatch: the last


@dataclass(frozen=True, slots=True)
class OpRow:
    """The rules of one op.

    Some of them are about the place of an action in its worker's list. They join `needs` and `makes` where an action
    takes a value away:

    - `closes`: how far the action closes the replica. ``0`` closes it up to the action's microbatch, ``-1`` up to the
      one before, `ALL` for the rest of the step. An action that `touches` the replica must come before.
    - `finds` and `leaves`: the form of the stage's weights before and after, where the job shards them.

          shadow   1F0 1F1 1STREAM1 1F2 ... 1LOG    1F1 behind 1STREAM1, or 1F2 behind 1LOG, comes too late
          owner    0UNSHARD 0F0 0B0 0RESHARD 0STEP  0F0 before 0UNSHARD finds shards
    """

    about: str
    stands: StepPosition
    shown: LegendEntry
    needs: tuple[Term, ...] = ()
    makes: tuple[Term, ...] = ()
    work: Work | None = None  # None: the op does not compute
    redoes: str = ""  # the op whose output this one makes again
    peer: int = 0  # the other end of a transfer, in stages from this one
    meets: bool = False  # the owners of the stage in all pipelines run it together
    per_pipeline: bool = False  # needs and makes the same for each pipeline in which the worker owns the stage
    touches: bool = False
    closes: int | None = None
    finds: WeightForm | None = None  # an op that computes finds the weights whole
    leaves: WeightForm | None = None


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
    SHIP = "SHIP"
    OFFLOAD = "OFFLOAD"
    RELOAD = "RELOAD"
    OFFLOAD_W = "OFFLOAD_W"
    RELOAD_W = "RELOAD_W"


_INPUT = Term(Kind.ACTIVATION, stage=-1)
_OUTPUTS = (Term(Kind.ACTIVATION), Term(Kind.RESIDUAL))
_STATE_BEFORE = Term(Kind.RESIDUAL, microbatch=-1, slicing=Slicing.WITHIN)
_FOR_BACKWARD = (
    Term(Kind.RESIDUAL, slicing=Slicing.TURNED),
    Term(Kind.GRADIENT, stage=1),
    Term(Kind.CARRY, microbatch=-1, slicing=Slicing.WITHIN),
)
_INPUT_GRADIENTS = (Term(Kind.GRADIENT), Term(Kind.CARRY, slicing=Slicing.WITHIN))
_COUNTED_BEFORE = Term(Kind.COUNTED, microbatch=-1)
_ADDED_BEFORE = Term(Kind.ADDED, microbatch=-1)
_OWN_SUMS = (Term(Kind.ADDED, by=By.OWNER), Term(Kind.COUNTED, by=By.OWNER))
_OWN_REDUCED = (Term(Kind.REDUCED, by=By.OWNER), Term(Kind.REDUCED, Where.TIED, by=By.OWNER))
_SUMS_TAKEN = (Term(Kind.ADDED, by=By.SHADOW), Term(Kind.COUNTED, by=By.SHADOW))


def _transfer(about: str, value: Term, peer: int, *, sends: bool) -> OpRow:
    here, wire = (value,), (value._replace(at=Where.WIRE),)
    needs, makes = (here, wire) if sends else (wire, here)
    return OpRow(
        about, StepPosition.BORDER, LegendEntry.TRANSFER if sends else LegendEntry.WAITING, needs, makes, peer=peer
    )


def _copy(about: str, needed: Kind, made: Kind | None = None) -> OpRow:
    makes = () if made is None else (Term(made),)
    return OpRow(f"{about}, beside computing", StepPosition.STASH, LegendEntry.TRANSFER, (Term(needed),), makes)


OP_TABLE: Final[dict[Op, OpRow]] = {
    Op.F: OpRow(
        "forward",
        StepPosition.FORWARD,
        LegendEntry.FORWARD,
        (_INPUT, _COUNTED_BEFORE, _STATE_BEFORE),
        (*_OUTPUTS, Term(Kind.COUNTED)),
        Work.FORWARD,
        touches=True,
    ),
    Op.REDO_F: OpRow(
        "forward again: no buffer update, no loss",
        StepPosition.AGAIN,
        LegendEntry.FORWARD,
        (_INPUT, _STATE_BEFORE),
        _OUTPUTS,
        Work.FORWARD,
        redoes=Op.F,
    ),
    Op.B: OpRow(
        "backward",
        StepPosition.BACKWARD,
        LegendEntry.BACKWARD,
        (*_FOR_BACKWARD, _ADDED_BEFORE),
        (*_INPUT_GRADIENTS, Term(Kind.ADDED)),
        Work.BACKWARD,
        closes=-1,
    ),
    Op.I: OpRow(
        "backward for the input",
        StepPosition.PART,
        LegendEntry.PARTS,
        _FOR_BACKWARD,
        (*_INPUT_GRADIENTS, Term(Kind.PENDING)),
        Work.FOR_INPUT,
        redoes=Op.B,
    ),
    Op.W: OpRow(
        "backward for the weights",
        StepPosition.PART,
        LegendEntry.PARTS,
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
        StepPosition.STREAM,
        LegendEntry.REDUCE,
        (*_OWN_SUMS, Term(Kind.STREAMED, Where.WIRE, by=By.SHADOW)),
        (*_SUMS_TAKEN, Term(Kind.STREAMED, Where.WIRE, by=By.OWNER)),
        touches=True,
        closes=0,
    ),
    Op.HAND: OpRow(
        "send of a slot's gradient accumulator to its next owner",
        StepPosition.HAND_OVER,
        LegendEntry.REDUCE,
        (Term(Kind.ADDED, by=By.SHADOW), Term(Kind.STREAMED, Where.WIRE, by=By.OWNER)),
        (*_OWN_SUMS, Term(Kind.STREAMED, Where.WIRE, by=By.SHADOW)),
        touches=True,
        closes=0,
    ),
    Op.UNSHARD: OpRow(
        "all-gather of a stage's weights among its owners",
        StepPosition.ANY_TIMES,
        LegendEntry.TRANSFER,
        meets=True,
        finds=WeightForm.IN_SHARDS,
        leaves=WeightForm.WHOLE,
    ),
    Op.RESHARD: OpRow(
        "release of the weights of other shards",
        StepPosition.ANY_TIMES,
        LegendEntry.TRANSFER,
        finds=WeightForm.WHOLE,
        leaves=WeightForm.IN_SHARDS,
    ),
    Op.HEAL: OpRow(
        "send of a slot's state at the step boundary to a new shadow",
        StepPosition.HEALING,
        LegendEntry.HEAL,
        (Term(Kind.STATE, Where.WIRE, by=By.SHADOW),),
        (Term(Kind.STATE, Where.WIRE, by=By.OWNER), Term(Kind.STATE, by=By.SHADOW)),
        touches=True,
    ),
    Op.REDUCE_GRAD: OpRow(
        "sum of a stage's gradients over the pipelines",
        StepPosition.STAGE,
        LegendEntry.REDUCE,
        (Term(Kind.ADDED, microbatch=ALL), Term(Kind.COUNTED, microbatch=ALL)),
        (Term(Kind.REDUCED), Term(Kind.REDUCED, Where.WIRE)),
        meets=True,
        per_pipeline=True,
    ),
    Op.LOG: OpRow(
        "send of the inputs of a slot's optimizer step to its shadows",
        StepPosition.REPLICA,
        LegendEntry.REDUCE,
        (*_OWN_REDUCED, Term(Kind.LOGGED, Where.WIRE, by=By.SHADOW)),
        (Term(Kind.LOGGED), Term(Kind.LOGGED, Where.WIRE, by=By.OWNER)),
        closes=ALL,
    ),
    Op.COMMIT: OpRow(
        "vote of a replica for the commit",
        StepPosition.REPLICA,
        LegendEntry.COMMIT,
        (Term(Kind.LOGGED),),
        (Term(Kind.VOTED, Where.WIRE),),
    ),
    Op.STEP: OpRow(
        "optimizer step",
        StepPosition.REPLICA,
        LegendEntry.COMMIT,
        (Term(Kind.VOTED, Where.VOTERS),),
        finds=WeightForm.IN_SHARDS,
    ),
    Op.CHECKPOINT: OpRow("copy and write of a stage's state for a checkpoint", StepPosition.WRITER, LegendEntry.COMMIT),
    Op.SHIP: OpRow(
        "send of a residual of a slot to its next owner",
        StepPosition.HAND_OVER,
        LegendEntry.TRANSFER,
        (
            Term(Kind.RESIDUAL, by=By.SHADOW),
            Term(Kind.RESIDUAL, Where.WIRE, by=By.OWNER),
            Term(Kind.COUNTED, microbatch=-1, by=By.OWNER),
        ),
        (
            Term(Kind.RESIDUAL, by=By.OWNER),
            Term(Kind.COUNTED, by=By.OWNER),
            Term(Kind.RESIDUAL, Where.WIRE, by=By.SHADOW),
        ),
        touches=True,
    ),
    Op.OFFLOAD: _copy("copy of a residual to the host", Kind.RESIDUAL, Kind.HOSTED),
    Op.RELOAD: _copy("copy of a residual back from the host", Kind.HOSTED),
    Op.OFFLOAD_W: _copy("copy of what a backward for the weights needs to the host", Kind.PENDING, Kind.HOSTED_PENDING),
    Op.RELOAD_W: _copy("copy of what a backward for the weights needs back from the host", Kind.HOSTED_PENDING),
}


def ops_at(*stands: StepPosition) -> frozenset[Op]:
    """Returns the ops that stand in one of these places."""
    return frozenset(op for op, row in OP_TABLE.items() if row.stands in stands)


def ops_that_make(kind: Kind, at: Where = Where.HERE) -> frozenset[Op]:
    """Returns the ops that make a kind of value at a place, on some worker."""
    return frozenset(op for op, row in OP_TABLE.items() if any((kind, at) == term[:2] for term in row.makes))


COMPUTE_OPS = frozenset(op for op, row in OP_TABLE.items() if row.work)
FORWARD_OPS = COMPUTE_OPS & ops_that_make(Kind.RESIDUAL)
ADDING_OPS = COMPUTE_OPS & ops_that_make(Kind.ADDED)
SHARD_OPS = ops_at(StepPosition.ANY_TIMES)  # the only ops that a step may repeat on a stage
STASH_OPS = ops_at(StepPosition.STASH)  # of one worker alone: no other worker's program depends on them
LEAVE_OPS = STASH_OPS & (ops_that_make(Kind.HOSTED) | ops_that_make(Kind.HOSTED_PENDING))
STAGE_OPS = SHARD_OPS | ops_at(StepPosition.HEALING, StepPosition.STAGE, StepPosition.REPLICA, StepPosition.WRITER)
SEND_OPS = frozenset(op for op in ops_at(StepPosition.BORDER) if OP_TABLE[op].makes[0].at is Where.WIRE)
RECEIVE_OPS = ops_at(StepPosition.BORDER) - SEND_OPS

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
        stage, op, microbatch, pipeline = self
        return f"{stage}{op}{'' if microbatch == WHOLE_STAGE else microbatch}{f'@{pipeline}' if pipeline else ''}"


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
