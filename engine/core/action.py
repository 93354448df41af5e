"""Actions, and their text form.

An action is one thing that a worker does: ``2F0`` is the forward of stage 2 on microbatch 0. Actions of pipeline 0 are
written as in torch's pipelining; actions of another pipeline carry its number: ``2F0@1``. Actions on a whole stage
have no microbatch: ``2STEP``. An action does not name its worker. In the list of a worker that shadows stage 3,
``3F0`` is a redundant forward, and ``3LOG`` receives the gradients that the owner's ``3LOG`` sends.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from engine.core.errors import ScheduleError


class Op(StrEnum):
    """The kind of an action."""

    __hash__ = str.__hash__  # Enum's hash is written in Python and took a quarter of a dry run

    F = "F"  # forward; updates the buffers
    REDO_F = "f"  # the same forward again: no buffer update, no loss
    B = "B"  # backward; adds to the gradient accumulator
    I = "I"  # backward for the input only  # noqa: E741 - the field's name for it
    W = "W"  # backward for the weights only; adds to the gradient accumulator
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    STREAM = "STREAM"  # the owner of a slot sends the gradient accumulator after a backward to the shadows
    UNSHARD = "UNSHARD"  # all-gather of a stage's weights among the owners of the stage
    RESHARD = "RESHARD"  # a worker frees the gathered weights and keeps its own shard
    HEAL = "HEAL"  # the owner of a slot sends its state at the step boundary to a new shadow
    REDUCE_GRAD = "REDUCE_GRAD"
    LOG = "LOG"  # the owner of a slot sends the inputs of the optimizer step to the shadows
    COMMIT = "COMMIT"
    STEP = "STEP"


COMPUTE_OPS = frozenset({Op.F, Op.REDO_F, Op.B, Op.I, Op.W})
FORWARD_OPS = frozenset({Op.F, Op.REDO_F})
RECEIVE_OPS = frozenset({Op.RECV_F, Op.RECV_B})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
SHARD_OPS = frozenset({Op.UNSHARD, Op.RESHARD})  # the only ops that a step may repeat on a stage
STAGE_OPS = SHARD_OPS | {Op.HEAL, Op.REDUCE_GRAD, Op.LOG, Op.COMMIT, Op.STEP}

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


def make_action(stage: int, op: Op, microbatch: int, pipeline: int = 0) -> Action:
    """Returns an action in half the time of `Action(...)`: a long program creates a million actions."""
    return _new(Action, (stage, op, microbatch, pipeline))


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
