"""Finds in the events of a run the work that a death leaves to redo; its time is the floor of the pause.

There is one pipeline, and one slot per worker. The victim's work in the open step is lost, with two exceptions: the
microbatches whose accumulators it had streamed, and the forwards that an eager shadow had also run before the last
survivor stopped. The schedule limits the number of these forwards (`redundant_forward_pass.py`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from engine.core.action import Action, Op, parse_action
from engine.core.history.run_records import ActionRecord
from engine.core.program.replay import replayed


class Redo(NamedTuple):
    """The microbatches of the victim's stage that are redone; in `left`, those whose forward no shadow had run."""

    backwards: frozenset[int]
    forwards: frozenset[int]
    left: frozenset[int]


def redo_of(records: Iterable[ActionRecord], step: int, stage: int, fenced_ns: int, log_every: int = 0) -> Redo:
    """Returns the work of a dead worker's stage to redo in a step; all survivors had stopped by `fenced_ns`."""
    lost: set[Action] = set()
    shadowed: set[Action] = set()
    for record in records:
        if record.step == step and record.end_ns <= fenced_ns:
            action = parse_action(record.action)
            if action.stage == stage:
                (lost if record.worker == stage else shadowed).add(action)
    streamed = sum(action.op is Op.STREAM for action in lost) * log_every
    first = [Action(stage, op, each) for op in (Op.B, Op.F) for each in range(streamed, _after(lost))]
    again = replayed(first, lost)
    backwards, forwards = ([each for each in again if each.op is op] for op in (Op.B, Op.F))
    left = _microbatches(forwards) - _microbatches(replayed(forwards, shadowed))
    return Redo(_microbatches(backwards), _microbatches(forwards), left)


def _after(actions: Iterable[Action]) -> int:
    return max((action.microbatch + 1 for action in actions), default=0)


def _microbatches(actions: Iterable[Action]) -> frozenset[int]:
    return frozenset(action.microbatch for action in actions)
