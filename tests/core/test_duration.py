"""Durations: what people write, and the nanoseconds that are meant."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.units import DURATION_PATTERN, duration_text, parse_duration
from tests.looped import looped


@looped(
    ("text", "time_ns"),
    [
        ("250ms", 250_000_000),
        ("5s", 5_000_000_000),
        ("2m", 120_000_000_000),
        ("1h", 3_600_000_000_000),
        ("10us", 10_000),
        ("0s", 0),
        ("1.5s", 1_500_000_000),
        ("0.1ms", 100_000),
        (" 5s ", 5_000_000_000),
    ],
)
def test_a_duration_is_exact(text: str, time_ns: int) -> None:
    assert parse_duration(text) == time_ns


@looped("text", ["", "5", "s", "-5s", "5 s", "1e3s", "5S", "1.s", "0.0001us", "5min", "nan"])
def test_what_is_no_duration(text: str) -> None:
    assert parse_duration(text) is None


@given(st.integers(0, 10**9).map(lambda number: number * 1000))
def test_a_duration_survives_being_written(time_ns: int) -> None:
    text = duration_text(time_ns)
    assert parse_duration(text) == time_ns
    assert re.fullmatch(DURATION_PATTERN, text)


@pytest.mark.parametrize(("time_ns", "text"), [(90_000_000_000, "90s"), (120_000_000_000, "2m"), (5_000, "5us")])
def test_a_duration_is_written_in_the_largest_unit_that_is_whole(time_ns: int, text: str) -> None:
    assert duration_text(time_ns) == text
