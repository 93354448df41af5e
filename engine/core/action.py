"""Actions, and their text form.

An action is one thing that a worker does: ``2F0`` is the forward of stage 2 on microbatch 0. Actions of pipeline 0 are
written as torch's pipelining writes them; those of another pipeline carry its number: ``2F0@1``. Actions on a whole
stage have no microbatch: ``2STEP``. An action does not say which worker runs it: ``3F0`` in the list of a worker that
shadows stage 3 is a redundant forward, ``3LOG`` there the receipt of what the owner's ``3LOG`` sends.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from engine.core.errors import ScheduleError


class Op(StrEnum):
    """What an action does."""

    __hash__ = str.__hash__  # that of Enum is written in Python: a quarter of the time of a dry run

    F = "F"  # forward; counts in the buffers
    REDO_F = "f"  # forward that has counted already: pure, no buffer update, no loss
    B = "B"  # backward; adds to the accumulator
    I = "I"  # backward for the input only  # noqa: E741 - the field's name for it
    W = "W"  # backward for the weights only; adds to the accumulator
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    STREAM = "STREAM"  # what a slot has added up after a backward, from its owner to its shadows
    UNSHARD = "UNSHARD"  # the weights of a stage are put together from their shards, by all owners of the stage
    RESHARD = "RESHARD"  # a worker keeps its shard of them alone
    HEAL = "HEAL"  # the state of a slot as of the step boundary, from its owner to a new shadow
    REDUCE_GRAD = "REDUCE_GRAD"
    LOG = "LOG"  # all that the optimizer step of a slot reads, put together by its owner, sent to its shadows
    COMMIT = "COMMIT"
    STEP = "STEP"


COMPUTE_OPS = frozenset({Op.F, Op.REDO_F, Op.B, Op.I, Op.W})
FORWARD_OPS = frozenset({Op.F, Op.REDO_F})
RECEIVE_OPS = frozenset({Op.RECV_F, Op.RECV_B})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
SHARD_OPS = frozenset({Op.UNSHARD, Op.RESHARD})  # the only ones that may stand several times in a step
STAGE_OPS = SHARD_OPS | {Op.HEAL, Op.REDUCE_GRAD, Op.LOG, Op.COMMIT, Op.STEP}

WHOLE_STAGE = -1

_new = tuple.__new__
_OPS = {op.value: op for op in Op}
_TEXT = re.compile(r"([0-9]{1,9})(f|[A-Z]+(?:_[A-Z]+)?)([0-9]{0,9})(?:@([0-9]{1,9}))?")


class Action(NamedTuple):
    """One action; `microbatch` is `WHOLE_STAGE` for the ops that concern a whole stage.

    A tuple with names: programs hold a hundred thousand of them, and a data class takes longer to make and to hash.
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
    """Returns an action; half the time of calling its class, for those who make a million of them."""
    return _new(Action, (stage, op, microbatch, pipeline))


def parse_action(text: str) -> Action:
    """Returns the action that `text` spells; raises ScheduleError when it spells none."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or match[2] not in _OPS:
        raise ScheduleError(f"expected an action such as 2F0 or 1SEND_B3, found {text!r}")
    op = _OPS[match[2]]
    if (op in STAGE_OPS) == bool(match[3]):
        form = "no microbatch" if op in STAGE_OPS else "a microbatch"
        raise ScheduleError(f"expected {form} after {op.value}, found {text!r}")
    microbatch = int(match[3]) if match[3] else WHOLE_STAGE
    return Action(int(match[1]), op, microbatch, int(match[4] or 0))
