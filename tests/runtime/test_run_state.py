"""The results of a run: the errors that end it, and the records that count once."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.errors import ExitCode, Problem, RepeatedExceptionError, WorkerException
from engine.core.history.run_records import CommitRecord
from engine.core.job.job import Job
from engine.core.message_kinds import ToAgent, kinds
from engine.core.messages import CutMessage, FailedMessage, NoticeMessage, RaisedMessage, RefusedMessage
from engine.core.protocol.coordinator import RULES
from engine.runtime.agent.agent import _OWN_PARTS
from engine.runtime.agent.run_state import RunState

MEMBER: Any = SimpleNamespace(worker=1, name="worker 1 (pid 7)", child=SimpleNamespace(pid=7), log="logs/worker-1.log")


def words(error: str = "RuntimeError: planted", step: int = 3) -> RaisedMessage:
    return RaisedMessage(7, step, WorkerException(error, "layer 2 (fc2)", "mine.py", 31, "forward"))


@pytest.mark.parametrize(
    ("last", "code", "text"),
    [
        (RefusedMessage((Problem("lr", "a number", "x"),)), ExitCode.USAGE, "lr: expected a number, found x"),
        (
            FailedMessage("the loss is nan", ExitCode.NOT_FINITE),
            ExitCode.NOT_FINITE,
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
    error = RunState(Job()).error_of(MEMBER, last, has_commit=True)
    assert error.exit_code == code
    assert str(error).startswith(text)


def test_the_same_exception_of_two_workers_is_one_error_that_names_the_culprit() -> None:
    """It was reported three times, and nothing concluded that no worker was at fault."""
    ledger, other = RunState(Job()), SimpleNamespace(worker=0, name="worker 0 (pid 6)", log="logs/worker-0.log")
    assert ledger.first_to_raise(0, words()) == 0
    error = ledger.error_of(MEMBER, words(), has_commit=True)
    assert isinstance(error, RepeatedExceptionError) and error.exit_code == ExitCode.NOT_RECOVERED
    assert str(error) == (
        "in layer 2 (fc2): RuntimeError: planted (mine.py:31, in forward); worker 0 and worker 1 raised the same in "
        "step 3: it is the model, not a worker; full text in logs/worker-1.log"
    )
    of_data = RaisedMessage(7, 3, WorkerException("KeyError: 3", "the data"))
    ledger.first_to_raise(1, of_data)
    assert "it is the data, not a worker" in str(ledger.error_of(cast(Any, other), of_data, has_commit=True))
    assert not isinstance(ledger.error_of(MEMBER, words(step=4), has_commit=True), RepeatedExceptionError)


def test_an_exception_of_the_users_before_the_first_commit_is_the_users_mistake() -> None:
    ledger = RunState(Job())
    error = ledger.error_of(MEMBER, words(), has_commit=False)
    assert error.exit_code == ExitCode.USAGE
    assert str(error) == "in layer 2 (fc2): RuntimeError: planted (mine.py:31, in forward)"
    elsewhere = RaisedMessage(7, 0, WorkerException("RuntimeError: planted"))
    assert ledger.error_of(MEMBER, elsewhere, has_commit=False).exit_code == ExitCode.NOT_RECOVERED


def test_a_gpu_is_no_mistake_of_the_users_code() -> None:
    """A job that does not fit into its GPUs is told so, with a way out; a broken GPU fails the run."""
    full, broken = "GPU out of memory: tried to allocate 2.00 GiB", "GPU error: invalid argument"
    for gpu, code in ((full, ExitCode.ENVIRONMENT), (broken, ExitCode.NOT_RECOVERED)):
        last = RaisedMessage(7, 0, replace(words().exception, gpu=gpu))
        error = RunState(Job()).error_of(MEMBER, last, has_commit=False)
        assert error.exit_code == code
        assert str(error).startswith(f"worker 1 (pid 7) ended with {gpu}, in layer 2 (fc2) of step 0 (mine.py:31")
        assert ("microbatch_size" in str(error)) == (gpu == full)


@pytest.mark.parametrize(
    ("job", "place", "is_told"),
    [
        (Job(model="mine:net"), "the forward of the model", True),
        (Job(model="mine:net"), "layer 0 (embed)", True),
        (Job(model="mine:net"), "the factory mine:net", False),
        (Job(model="mine:net", data="mine:rows"), "layer 0 (embed)", False),
        (Job(model="gpt"), "layer 0 (embed)", False),
    ],
)
def test_a_first_forward_that_fails_tells_of_data_that_the_job_does_not_name(
    job: Job, place: str, is_told: bool
) -> None:
    told = RunState(job).at_start(WorkerException("RuntimeError: Expected Long, Int", place, "mine.py", 50, "forward"))
    assert told.endswith(
        "; the job names no data, so it trains on the built-in synthetic float vectors: name data by --data"
        if is_told
        else "(mine.py:50, in forward)"
    )


def test_every_message_to_the_agent_has_a_rule() -> None:
    engine = {each for each in kinds().values() if each.__module__.startswith("engine.core.")}
    to_agent = {each for each in engine if issubclass(each, ToAgent)}
    assert to_agent == {*_OWN_PARTS, *RULES, NoticeMessage}


def commit(step: int) -> CommitRecord:
    return CommitRecord(step=step, loss=0.5 + step, grad_norm=1.0, clip_factor=1.0, last=False)


def test_a_commit_that_another_coordinator_writes_again_counts_once() -> None:
    ledger = RunState(Job(model="mlp"))
    ledger.cut(CutMessage((0,), ("fc1",)))
    assert [ledger.books(commit(step)) for step in (0, 1, 1, 2)] == [True, True, False, True]
    assert ledger.losses == [0.5, 1.5, 2.5]
