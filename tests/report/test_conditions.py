"""Conditions: what they mean, and what is refused."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from engine.core.errors import UserError
from engine.report.conditions import parse_condition

TABLES = {
    "recovery": pd.DataFrame({"total_ms": [100.0, 200.0, math.nan], "who": ["1", "2", "3"]}),
    "steps": pd.DataFrame({"loss": pd.Series([], dtype="float64")}),
}


@pytest.mark.parametrize(
    ("text", "found", "holds"),
    [
        ("recovery.total_ms.max > 150", 200.0, True),
        ("recovery.total_ms.p50>=150", 150.0, True),
        ("recovery.total_ms.p95 > 500", 195.0, False),
        ("recovery.total_ms.count != 2", 2.0, False),
        (" recovery.total_ms.mean<1.6e2 ", 150.0, True),
        ("recovery.total_ms.sum == 300", 300.0, True),
        ("recovery.total_ms.min <= 99", 100.0, False),
        ("steps.loss.count < 1", 0.0, True),
    ],
)
def test_a_condition_compares_a_figure(text: str, found: float, holds: bool) -> None:
    condition = parse_condition(text, TABLES)
    assert condition.measure(TABLES) == pytest.approx(found)
    assert condition.holds(condition.measure(TABLES)) is holds


def test_a_figure_of_no_values_meets_no_condition() -> None:
    for comparison in ("> 0", "<= 0", "!= 0"):
        condition = parse_condition(f"steps.loss.p95 {comparison}", TABLES)
        assert not condition.holds(condition.measure(TABLES))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("recovery.total_ms > 5", "TABLE.COLUMN.FIGURE"),
        ("recovery.total_ms.p95 > 5 or 1", "TABLE.COLUMN.FIGURE"),
        ("recovery.total_ms.p95 > __import__('os')", "TABLE.COLUMN.FIGURE"),
        ("recovry.total_ms.p95 > 5", "did you mean 'recovery'?"),
        ("recovery.totl_ms.p95 > 5", "did you mean 'total_ms'?"),
        ("recovery.who.p95 > 5", "a column of numbers of recovery: one of total_ms"),
        ("recovery.total_ms.p101 > 5", "or p0 to p100"),
        ("recovery.total_ms.medin > 5", "did you mean 'median'?"),
        ("recovery.total_ms.p95 > 1.2.3", "a number after the operator"),
    ],
)
def test_what_is_no_condition_is_refused(text: str, said: str) -> None:
    with pytest.raises(UserError) as refusal:
        parse_condition(text, TABLES)
    assert said in str(refusal.value)
