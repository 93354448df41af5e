"""Conditions: their meaning, and the texts that are refused."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from engine.core.errors import ExitCode, UserError
from engine.report.conditions import parse_condition

TABLES = {
    "recovery": pd.DataFrame(
        {
            "outcome": ["recovered", "recovered", "harmless"],
            "stall_ms": [100.0, 200.0, math.nan],
            "stall_most_ms": [100.0, 200.0, math.nan],
            "who": ["1", "2", "3"],
        }
    ),
    "steps": pd.DataFrame({"loss": pd.Series([], dtype="float64")}),
}


@pytest.mark.parametrize(
    ("text", "found", "holds"),
    [
        ("recovery.stall_ms.max > 150", 200.0, True),
        ("recovery.stall_ms.p50>=150", 150.0, True),
        ("recovery.stall_ms.p95 > 500", 195.0, False),
        ("recovery.stall_ms.count != 2", 2.0, False),
        (" recovery.stall_ms.mean<1.6e2 ", 150.0, True),
        ("recovery.stall_ms.sum == 300", 300.0, True),
        ("recovery.stall_ms.min <= 99", 100.0, False),
        ("steps.loss.count < 1", 0.0, True),
    ],
)
def test_a_condition_compares_a_figure(text: str, found: float, holds: bool) -> None:
    code = ExitCode.EXPECTATION_FAILED if holds else ExitCode.OK
    assert parse_condition(text, TABLES).judge(TABLES) == (code, f"found {found:g}")


@pytest.mark.parametrize("figure", ["p95", "max", "sum"])
@pytest.mark.parametrize("comparison", ["> 0", "<= 0", "!= 0"])
def test_a_figure_of_no_values_is_no_pass(figure: str, comparison: str) -> None:
    condition = parse_condition(f"steps.loss.{figure} {comparison}", TABLES)
    assert condition.judge(TABLES) == (ExitCode.NOTHING_MATCHED, "nothing to measure")


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
        assert judged(f"recovery.stall_ms.{text}") == (ExitCode.EXPECTATION_FAILED, "not recovered")
    assert judged("recovery.detect_ms.max > 500") == (ExitCode.OK, "found 1")
    assert judged("recovery.lost_steps.sum > 0") == (ExitCode.OK, "found 0")
    assert judged("recovery.stall_ms.count > 5") == (ExitCode.OK, f"found {len(times) - 1}")


def test_bounds_of_a_stall_never_look_better_than_the_truth() -> None:
    bounds = {"stall_ms": [100.0, 40.0], "stall_most_ms": [100.0, 430.0]}
    tables = {"recovery": pd.DataFrame({"outcome": "recovered", **bounds})}
    for limit, code in ((30, 1), (50, 1), (420, 1), (430, 0)):
        found = "found at least 100, at most 430"
        assert parse_condition(f"recovery.stall_ms.max > {limit}", tables).judge(tables) == (ExitCode(code), found)


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
