"""Exceptions of workers: which are deaths like any other, and which end the run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.core.errors import ExitCode, Problem
from engine.core.membership.state import Options, State, begin
from engine.core.message_codec import ToAgent, kinds
from engine.core.messages import FailedMessage, RaisedMessage, RefusedMessage
from engine.core.worker_exception import WorkerException
from engine.runtime.agent.message_handlers import _HANDLERS
from engine.runtime.agent.run_state import error_of
from engine.runtime.agent.worker_errors import WorkerErrors

SHADOWED: State = begin(Options(stages=3, redundant=True), (0, 1, 2), ((2,), (0,), (1,)), 7, 0)
ALONE: State = begin(Options(stages=3, redundant=False), (0, 1, 2), ((), (), ()), 7, 0)

MEMBER: Any = SimpleNamespace(worker=1, child=SimpleNamespace(pid=7), log="logs/worker-1.log")


def words(error: str = "RuntimeError: planted", step: int = 3) -> RaisedMessage:
    return RaisedMessage(7, step, WorkerException(error, "layer 2 (fc2)", "mine.py", 31, "forward"))


def test_who_raises_is_dead_where_somebody_can_take_over() -> None:
    assert WorkerErrors().is_survivable(1, words(), SHADOWED)
    assert not WorkerErrors().is_survivable(1, words(), ALONE)


def test_no_exception_ends_a_run_that_has_committed_every_step() -> None:
    """A mistake in the validation after the last step made a failed run of a finished one."""
    raised, over = WorkerErrors(), ALONE._replace(committed=ALONE.last_step)
    assert raised.is_survivable(1, words(), over)
    assert raised.is_survivable(0, words(), over)


def test_the_same_error_in_the_same_step_is_the_models_own() -> None:
    raised = WorkerErrors()
    assert raised.is_survivable(1, words(), SHADOWED)
    assert raised.is_survivable(0, words(step=4), SHADOWED)
    assert raised.is_survivable(0, words("RuntimeError: another"), SHADOWED)
    assert not raised.is_survivable(0, words(), SHADOWED)


@pytest.mark.parametrize(
    ("last", "code", "text"),
    [
        (RefusedMessage((Problem("lr", "a number", "x"),)), ExitCode.USAGE, "lr: expected a number, found x"),
        (
            FailedMessage("the loss is nan", ExitCode.EXPECTATION_FAILED),
            ExitCode.EXPECTATION_FAILED,
            "worker 1 (pid 7): the loss",
        ),
        (FailedMessage("no etcd", ExitCode.ENVIRONMENT), ExitCode.ENVIRONMENT, "worker 1 (pid 7): no etcd"),
        (
            words(),
            ExitCode.NOT_RECOVERED,
            "worker 1 (pid 7) raised RuntimeError: planted, in layer 2 (fc2) of step 3 (mine.py:31, in forward); "
            "full text in logs/worker-1.log",
        ),
    ],
    ids=["refused", "diverged", "failed", "raised"],
)
def test_a_last_message_ends_the_run_with_its_error(last: Any, code: ExitCode, text: str) -> None:
    error = error_of(MEMBER, last, has_commit=True)
    assert error.exit_code == code
    assert str(error).startswith(text)


def test_an_exception_of_the_users_before_the_first_commit_is_the_users_mistake() -> None:
    error = error_of(MEMBER, words(), has_commit=False)
    assert error.exit_code == ExitCode.USAGE
    assert str(error) == "in layer 2 (fc2): RuntimeError: planted (mine.py:31, in forward)"
    elsewhere = RaisedMessage(7, 0, WorkerException("RuntimeError: planted"))
    assert error_of(MEMBER, elsewhere, has_commit=False).exit_code == ExitCode.NOT_RECOVERED


def test_every_message_to_the_agent_has_a_handler() -> None:
    engine = {each for each in kinds().values() if each.__module__.startswith("engine.core.")}
    to_agent = {each for each in engine if issubclass(each, ToAgent)}
    assert to_agent == _HANDLERS.keys()
