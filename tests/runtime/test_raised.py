"""Exceptions of workers: which are deaths like any other, and which end the run."""

from __future__ import annotations

from typing import Any

from engine.core.membership.state import Options, State, begin
from engine.runtime.agent.worker_errors import RaisedErrors

SHADOWED: State = begin(Options(stages=3, redundant=True), (0, 1, 2), ((2,), (0,), (1,)), 7, 0)
ALONE: State = begin(Options(stages=3, redundant=False), (0, 1, 2), ((), (), ()), 7, 0)


def words(what: str = "RuntimeError: planted", step: int = 3) -> dict[str, Any]:
    return {"traceback": "Traceback ...", "what": what, "step": step, "code": 3}


def test_who_raises_is_dead_where_somebody_can_take_over() -> None:
    assert RaisedErrors().is_survivable(1, words(), SHADOWED)
    assert not RaisedErrors().is_survivable(1, words(), ALONE)


def test_the_same_error_in_the_same_step_is_the_models_own() -> None:
    raised = RaisedErrors()
    assert raised.is_survivable(1, words(), SHADOWED)
    assert raised.is_survivable(0, words(step=4), SHADOWED)
    assert raised.is_survivable(0, words("RuntimeError: another"), SHADOWED)
    assert not raised.is_survivable(0, words(), SHADOWED)


def test_what_is_no_exception_ends_the_run() -> None:
    assert not RaisedErrors().is_survivable(1, {"problems": []}, SHADOWED)
    assert not RaisedErrors().is_survivable(1, {"error": "the loss is nan", "code": 1}, SHADOWED)
