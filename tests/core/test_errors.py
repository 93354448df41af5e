"""Errors: one line for each problem, public exit codes, the nearest spelling."""

from __future__ import annotations

from engine.core.errors import (
    BambooError,
    DeadlockError,
    DivergedError,
    EnvironmentLacksError,
    ExitCode,
    InvariantError,
    NothingMatchedError,
    Problem,
    ScheduleError,
    StorageError,
    UserError,
    WorkerFailedError,
    nearest,
)
from tests.looped import looped


@looped(
    ("problem", "text"),
    [
        (Problem("lr", "a number"), "lr: expected a number"),
        (Problem("lr", "a number", "'x'"), "lr: expected a number, found 'x'"),
        (
            Problem("schedule", "one of a, b", "'c'", "did you mean 'a'?"),
            "schedule: expected one of a, b, found 'c' (did you mean 'a'?)",
        ),
        (Problem("warmup_steps", "a number", source="--warmup-steps"), "--warmup-steps: expected a number"),
        (Problem("lr", "a number", "'x'", source="--lr"), "--lr: expected a number, found 'x'"),
        (
            Problem("lr", "a number", "'x'", source="job.yaml", line=3, column=5),
            "job.yaml:3:5: lr: expected a number, found 'x'",
        ),
        (Problem("", "a mapping", source="job.yaml", line=1, column=1), "job.yaml:1:1: expected a mapping"),
    ],
)
def test_a_problem_is_one_line(problem: Problem, text: str) -> None:
    assert str(problem) == text


def test_a_users_error_holds_every_problem() -> None:
    problems = [Problem("a", "x"), Problem("b", "y", "2")]
    error = UserError(iter(problems))
    assert error.problems == tuple(problems)
    assert str(error) == "a: expected x\nb: expected y, found 2"


def test_a_deadlock_is_told_as_a_path() -> None:
    error = DeadlockError(((1, "1RECV_F0"), (0, "0RECV_B0"), (1, "1RECV_F0")))
    assert str(error) == "deadlock: worker 1: 1RECV_F0 -> worker 0: 0RECV_B0 -> worker 1: 1RECV_F0"
    assert error.exit_code == ExitCode.USAGE


@looped(
    ("kind", "code"),
    [
        (BambooError, 70),
        (UserError, 2),
        (ScheduleError, 2),
        (EnvironmentLacksError, 4),
        (StorageError, 74),
        (DivergedError, 7),
        (WorkerFailedError, 3),
        (NothingMatchedError, 5),
        (InvariantError, 70),
    ],
)
def test_each_error_says_the_exit_code(kind: type[BambooError], code: int) -> None:
    assert kind.exit_code == code
    assert issubclass(kind, BambooError)


def test_exit_codes_are_public_and_stay() -> None:
    assert {each.name: each.value for each in ExitCode} == {
        "OK": 0,
        "EXPECTATION_FAILED": 1,
        "USAGE": 2,
        "NOT_RECOVERED": 3,
        "ENVIRONMENT": 4,
        "NOTHING_MATCHED": 5,
        "INVALID_CASE": 6,
        "NOT_FINITE": 7,
        "COORDINATOR_UNAVAILABLE": 69,
        "INTERNAL": 70,
        "STORAGE": 74,
        "STOPPED_RESUMABLE": 75,
        "STATE_LOST": 80,
        "FENCED": 85,
        "LEFT_WITH_NOTICE": 86,
        "DEVICE_FAILED": 87,
        "HUNG_UP": 129,
        "INTERRUPTED": 130,
        "UNHEARD": 141,
        "TERMINATED": 143,
    }


def test_nearest_spelling() -> None:
    assert nearest("microbatch", ["stages", "microbatches"]) == "did you mean 'microbatches'?"
    assert nearest("zzz", ["stages", "microbatches"]) == ""
    assert nearest("x", []) == ""


def test_a_long_value_is_cut_in_a_message() -> None:
    """A number of 100,000 digits was quoted whole."""
    text = str(Problem("steps", "a whole number", "9" * 100_000))
    assert text == f"steps: expected a whole number, found {'9' * 500}..."
