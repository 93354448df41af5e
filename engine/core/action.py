"""Actions, and their text form.

An action is one thing that a worker does: ``2F0`` is the forward of stage 2 on microbatch 0. Actions of pipeline 0 are
written as torch's pipelining writes them; those of another pipeline carry its number: ``2F0@1``. Actions on a whole
stage have no microbatch: ``2STEP``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from engine.core.errors import ScheduleError


class Op(StrEnum):
    """What an action does."""

    F = "F"
    B = "B"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    COMMIT = "COMMIT"
    STEP = "STEP"


COMPUTE_OPS = frozenset({Op.F, Op.B})
RECEIVE_OPS = frozenset({Op.RECV_F, Op.RECV_B})
SEND_OPS = frozenset({Op.SEND_F, Op.SEND_B})
STAGE_OPS = frozenset({Op.REDUCE_GRAD, Op.COMMIT, Op.STEP})

WHOLE_STAGE = -1

_TEXT = re.compile(r"([0-9]{1,9})([A-Z]+(?:_[A-Z]+)?)([0-9]{0,9})(?:@([0-9]{1,9}))?")


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One action; `microbatch` is `WHOLE_STAGE` for the ops that concern a whole stage."""

    stage: int
    op: Op
    microbatch: int = WHOLE_STAGE
    pipeline: int = 0

    def __str__(self) -> str:
        microbatch = "" if self.microbatch == WHOLE_STAGE else str(self.microbatch)
        pipeline = f"@{self.pipeline}" if self.pipeline else ""
        return f"{self.stage}{self.op.value}{microbatch}{pipeline}"


def parse_action(text: str) -> Action:
    """Returns the action that `text` spells; raises ScheduleError when it spells none."""
    match = _TEXT.fullmatch(text.strip())
    if match is None or match[2] not in Op.__members__:
        raise ScheduleError(f"expected an action such as 2F0 or 1SEND_B3, found {text!r}")
    op = Op(match[2])
    if (op in STAGE_OPS) == bool(match[3]):
        form = "no microbatch" if op in STAGE_OPS else "a microbatch"
        raise ScheduleError(f"expected {form} after {op.value}, found {text!r}")
    microbatch = int(match[3]) if match[3] else WHOLE_STAGE
    return Action(int(match[1]), op, microbatch, int(match[4] or 0))
