"""What a death leaves to redo, read off the events of a run: the floor of any pause after it.

Rules: one slot on each worker, one pipeline. What the victim had done of the open step is gone, but for the
microbatches of which it had streamed the accumulators, and the forwards that an eager shadow had run as well by the
time at which the last survivor stopped. How many of these there can be, the places of redundant forwards decide
(`redundant_forward_pass.py`): a shadow has no gaps for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from engine.core.action import Op, parse_action


class Redo(NamedTuple):
    """Which microbatches of the victim's stage are to be redone; `left` are those of `forwards` that nobody had run."""

    backwards: frozenset[int]
    forwards: frozenset[int]
    left: frozenset[int]


def redo_of(events: Iterable[Mapping[str, Any]], step: int, stage: int, fenced_ns: int, log_every: int = 0) -> Redo:
    """Returns what the death of a stage's worker left to redo in a step; at `fenced_ns` the others had stopped."""
    done: dict[tuple[bool, Op], set[int]] = {}
    for event in events:
        if event["event"] == "action" and event["step"] == step and event["end_ns"] <= fenced_ns:
            action = parse_action(event["action"])
            if action.stage == stage:
                done.setdefault((event["worker"] == stage, action.op), set()).add(action.microbatch)
    streamed = len(done.get((True, Op.STREAM), ())) * log_every
    backwards, forwards = (
        frozenset(each for each in done.get((True, op), ()) if each >= streamed) for op in (Op.B, Op.F)
    )
    return Redo(backwards, forwards, forwards - done.get((False, Op.F), set()))
