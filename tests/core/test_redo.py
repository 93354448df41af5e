"""What a death leaves to redo: what is gone, less what was streamed and what an eager shadow had run as well."""

from __future__ import annotations

from typing import Any

from engine.bench import figures as redo
from engine.bench.figures import Redo
from engine.core.history.run_records import ActionRecord
from tests.core.made_records import made_history

STEP = 6


def redo_of(events: list[dict[str, Any]], step: int, stage: int, fenced_ns: int, log_every: int = 0) -> Redo:
    return redo.redo_of(made_history(events).of(ActionRecord), step, stage, fenced_ns, log_every)


def ran(worker: int, *actions: str, step: int = STEP, at_ns: int = 10) -> list[dict[str, Any]]:
    return [
        {"event": "action", "worker": worker, "step": step, "action": each, "start_ns": at_ns - 1, "end_ns": at_ns}
        for each in actions
    ]


def sets(backwards: set[int], forwards: set[int], left: set[int]) -> Redo:
    return Redo(frozenset(backwards), frozenset(forwards), frozenset(left))


VICTIM = ran(2, "2F0", "2F1", "2B0", "2F2", "2B1")


def test_what_the_victim_had_done_of_the_step_is_to_be_redone() -> None:
    others = ran(1, "1F0", "1B0") + ran(2, "2F3", step=STEP - 1) + [{"event": "commit", "step": STEP}]
    assert redo_of(VICTIM + others, STEP, 2, 10) == sets({0, 1}, {0, 1, 2}, {0, 1, 2})


def test_a_forward_that_an_eager_shadow_had_run_is_not() -> None:
    shadow = ran(1, "2F0", "2F1") + ran(1, "2F2", at_ns=11)  # this one it ran after the fence
    assert redo_of(VICTIM + shadow, STEP, 2, 10) == sets({0, 1}, {0, 1, 2}, {2})


def test_what_was_streamed_is_not() -> None:
    streamed = VICTIM + ran(2, "2STREAM0")
    assert redo_of(streamed, STEP, 2, 10, log_every=1) == sets({1}, {1, 2}, {1, 2})
