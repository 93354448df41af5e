"""Conditions: their meaning, and the texts that are refused."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from engine.core.errors import ExitCode, UserError
from engine.report.compare import parse_condition

TABLES = {
    "recovery": pd.DataFrame(
        {
            "outcome": ["recovered", "recovered", "no worker lost"],
            "stall_ms": [100.0, 200.0, math.nan],
            "stall_most_ms": [100.0, 200.0, math.nan],
            "who": ["1", "2", "3"],
        }
    ),
    "steps": pd.DataFrame({"loss": pd.Series([], dtype="float64")}),
}


@pytest.mark.parametrize(
    ("text", "said", "holds"),
    [
        ("recovery.stall_ms.max > 150", "max is 200 ms, > 150", True),
        ("recovery.stall_ms.p50>=150", "p50 is 150 ms, >= 150", True),
        ("recovery.stall_ms.p95 > 500", "p95 is 195 ms, not > 500", False),
        ("recovery.stall_ms.count != 2", "count is 2, not != 2", False),
        (" recovery.stall_ms.mean<1.6e2 ", "mean is 150 ms, < 160", True),
        ("recovery.stall_ms.sum == 300", "sum is 300 ms, == 300", True),
        ("recovery.stall_ms.min <= 99", "min is 100 ms, not <= 99", False),
    ],
)
def test_a_condition_compares_a_figure(text: str, said: str, holds: bool) -> None:
    code = ExitCode.EXPECTATION_FAILED if holds else ExitCode.OK
    assert parse_condition(text, TABLES).judge(TABLES) == (code, f"recovery.stall_ms.{said}")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (233.835, "234 ms, not > 500"),
        (499.7, "500 ms, not > 500"),
        (500.4, "500.4 ms, > 500"),  # "500 ms, > 500" would be no reason
        (0.01234567, "0.0123 ms, not > 500"),
        (12345.6, "12346 ms, > 500"),
    ],
)
def test_a_figure_has_the_digits_that_the_comparison_needs(found: float, said: str) -> None:
    """It said "passed: ... > 500 (found 233.835)", which reads as if 233 were more than 500."""
    tables = {"recovery": pd.DataFrame({"outcome": ["recovered"], "stall_ms": [found], "stall_most_ms": [found]})}
    _, text = parse_condition("recovery.stall_ms.p95 > 500", tables).judge(tables)
    assert text == f"recovery.stall_ms.p95 is {said}"


@pytest.mark.parametrize("figure", ["p95", "max", "sum"])
@pytest.mark.parametrize("comparison", ["> 0", "<= 0", "!= 0"])
def test_a_figure_of_no_values_is_no_pass(figure: str, comparison: str) -> None:
    condition = parse_condition(f"steps.loss.{figure} {comparison}", TABLES)
    assert condition.judge(TABLES) == (ExitCode.NOTHING_MATCHED, f"{condition.text}: nothing to measure")


@pytest.mark.parametrize("outcome", ["not recovered", "under way"])
@pytest.mark.parametrize("times", [[100.0, math.nan], [math.nan]])
def test_a_recovery_that_is_not_over_meets_every_condition_on_a_time_that_it_lacks(
    outcome: str, times: list[float]
) -> None:
    outcomes = [*["recovered"] * (len(times) - 1), outcome]
    numbers = {"stall_ms": times, "stall_most_ms": times, "detect_ms": 1.0, "lost_steps": 0}
    tables = {"recovery": pd.DataFrame({"outcome": outcomes, **numbers})}

    def judged(text: str) -> tuple[ExitCode, str]:
        return parse_condition(text, tables).judge(tables)

    for text in ("max > 500", "min < 5", "p0 > 500", "sum != 1"):
        assert judged(f"recovery.stall_ms.{text}") == (
            ExitCode.EXPECTATION_FAILED,
            f"recovery.stall_ms.{text}: a recovery did not reach the end of this time",
        )
    assert judged("recovery.detect_ms.max > 500") == (ExitCode.OK, "recovery.detect_ms.max is 1 ms, not > 500")
    assert judged("recovery.lost_steps.sum > 0") == (ExitCode.OK, "recovery.lost_steps.sum is 0, not > 0")
    count = f"recovery.stall_ms.count is {len(times) - 1}, not > 5"
    assert judged("recovery.stall_ms.count > 5") == (ExitCode.OK, count)


def test_bounds_of_a_stall_never_look_better_than_the_truth() -> None:
    bounds = {"stall_ms": [100.0, 40.0], "stall_most_ms": [100.0, 430.0]}
    tables = {"recovery": pd.DataFrame({"outcome": "recovered", **bounds})}
    for limit, code, relation in ((30, 1, ">"), (200, 1, "perhaps >"), (420, 1, "perhaps >"), (430, 0, "not >")):
        said = f"recovery.stall_ms.max is at least 100 ms, at most 430 ms, {relation} {limit}"
        assert parse_condition(f"recovery.stall_ms.max > {limit}", tables).judge(tables) == (ExitCode(code), said)


@pytest.mark.parametrize("former", ["total_ms", "gap_ms", "extra_ms"])
def test_a_former_name_leads_to_the_figure_of_today(former: str) -> None:
    with pytest.raises(UserError, match="did you mean 'stall_ms'"):
        parse_condition(f"recovery.{former}.p95 > 500", TABLES)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recovery.stall_ms > 5", "TABLE.COLUMN.FIGURE"),
        ("recovery.stall_ms.p95 > 5 or 1", "TABLE.COLUMN.FIGURE"),
        ("recovery.stall_ms.p95 > __import__('os')", "TABLE.COLUMN.FIGURE"),
        ("recovry.stall_ms.p95 > 5", "did you mean 'recovery'?"),
        ("recovery.stal_ms.p95 > 5", "did you mean 'stall_ms'?"),
        ("recovery.who.p95 > 5", "a column of numbers of recovery: one of stall_ms"),
        ("recovery.stall_ms.p101 > 5", "or p0 to p100"),
        ("recovery.stall_ms.medin > 5", "did you mean 'median'?"),
        ("recovery.stall_ms.p95 > 1.2.3", "a number after the operator"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_condition(text, TABLES)
    assert said in str(refusal.value)
