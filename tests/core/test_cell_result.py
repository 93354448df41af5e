"""Results of cells: their verdict, how a failure is called, the exit code of all, and their form on disk."""

from __future__ import annotations

import pytest

from engine.codec.values import read, text_of
from engine.core.checks.cell_result import (
    CellResult,
    counts_text,
    failure_of,
    judged,
    key_of,
    matrix_exit_code,
)
from engine.core.checks.expectations import Check
from engine.core.errors import ExitCode, InvariantError
from engine.core.history.process_records import Result
from tests.looped import looped

GOOD, BAD, VOID = Check("faults", "passed", "a"), Check("culprit", "failed", "b"), Check("faults", "invalid", "c")


def cell(result: Result) -> CellResult:
    return CellResult("a/b", result, "", "", "kill", 1.0, 0, "run")


@pytest.mark.parametrize(
    ("checks", "judgement"),
    [
        ([GOOD, GOOD], ("passed", "", "faults: a; faults: a")),
        ([GOOD, VOID], ("invalid", "", "faults: c")),
        ([VOID, BAD], ("failed", "mismatch", "culprit: b")),
    ],
)
def test_the_worst_check_decides(checks: list[Check], judgement: tuple[str, str, str]) -> None:
    assert judged(checks) == judgement


@looped(
    ("check", "failure"),
    [
        ("outcome", "no_recovery"),
        ("recovery.p95", "threshold"),
        ("recovery.phases.detect", "threshold"),
        ("steps_lost", "threshold"),
        ("trajectory", "mismatch"),
        ("culprit", "mismatch"),
        ("precision", "mismatch"),
    ],
)
def test_failures_have_names(check: str, failure: str) -> None:
    assert failure_of(check) == failure


@pytest.mark.parametrize(
    ("results", "code"),
    [
        (["passed", "passed"], ExitCode.OK),
        (["passed", "invalid"], ExitCode.INVALID_CASE),
        (["invalid", "failed", "passed"], ExitCode.EXPECTATION_FAILED),
        ([], ExitCode.NOTHING_MATCHED),
    ],
)
def test_exit_codes(results: list[Result], code: ExitCode) -> None:
    assert matrix_exit_code([cell(each) for each in results]) is code


def test_counts() -> None:
    assert counts_text([cell("passed"), cell("passed"), cell("invalid")]) == "2 passed, 0 failed, 1 invalid"


def test_it_goes_to_disk_and_back() -> None:
    result = CellResult("a", "failed", "hang", "t", "kill", 2.5, 3, "r", {"stage": "first"}, 7, "k")
    assert read(text_of(result), CellResult, "result") == result
    with pytest.raises(InvariantError, match="lacks its field 'result'"):
        read('{"cell":"a"}', CellResult, "result", is_whole=False)


def test_keys_tell_scenarios_and_settings_apart() -> None:
    assert key_of({"a": 1, "b": 2}, []) == key_of({"b": 2, "a": 1}, [])
    assert len({key_of({"a": 1}, []), key_of({"a": 2}, []), key_of({"a": 1}, ["x=1"])}) == 3
