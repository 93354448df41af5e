"""The ranges of steps that a run keeps: within its limit, evenly, and always those that recoveries are timed by."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.core.history.record_lines import AFTER, BEFORE, as_ranges, marked_steps, superfluous
from tests.core.made_records import records_of

SIZES = st.integers(1, 300).flatmap(lambda count: st.lists(st.integers(0, 9), min_size=count, max_size=count))
KEPT = st.frozensets(st.integers(0, 300), max_size=12)


@given(SIZES, KEPT, st.integers(0, 900))
def test_never_is_a_range_left_out_that_must_stay_and_never_more_bytes_stay_than_must(
    sizes: list[int], kept: frozenset[int], limit: int
) -> None:
    num_bytes = dict(enumerate(sizes))
    out = superfluous(num_bytes, kept, limit)
    always = {0, len(sizes) - 1, len(sizes) - 2} | kept
    assert out <= num_bytes.keys() - always
    left = num_bytes.keys() - out
    assert sum(num_bytes[each] for each in left) <= limit or left <= always


@given(SIZES, KEPT, st.integers(0, 900))
def test_nothing_is_left_out_within_the_limit_and_again_and_again_leaves_the_same(
    sizes: list[int], kept: frozenset[int], limit: int
) -> None:
    num_bytes = dict(enumerate(sizes))
    assert superfluous(num_bytes, kept, sum(sizes)) == set()
    for number in superfluous(num_bytes, kept, limit):
        del num_bytes[number]
    assert superfluous(num_bytes, kept, max(limit, sum(num_bytes.values()))) == set()


@settings(max_examples=40)
@given(st.integers(2, 300), st.integers(8, 50))
def test_a_run_that_grows_keeps_ranges_that_lie_evenly(count: int, most: int) -> None:
    there: dict[int, int] = {}
    for number in range(count):
        there[number] = 1
        for each in superfluous(there, (), most):
            del there[each]
        assert len(there) <= most
    assert max((later - earlier for earlier, later in pairwise(there)), default=0) <= max(1, 4 * count / (most - 4))


def test_the_steps_around_a_failure_a_fault_and_an_epoch_are_marked() -> None:
    def ran(*events: dict[str, Any]) -> set[int]:
        begin: list[dict[str, Any]] = [
            {"event": "epoch"},
            {"event": "go"},
            *({"event": "commit", "step": step} for step in range(10)),
        ]
        return marked_steps(records_of([*begin, *events]))

    around = {*range(10 - BEFORE, 10 + AFTER + 1)}
    signs: tuple[dict[str, Any], ...] = (
        {"event": "epoch"},
        {"event": "fault"},
        {"event": "raised"},
        {"event": "suspicion"},
        {"event": "notice"},
        {"event": "exit", "expected": False},
    )
    for event in signs:
        assert ran(event) == around
    assert ran({"event": "exit", "expected": True}, {"event": "validation"}) == set()


def test_a_fault_in_the_first_step_after_a_checkpoint_is_marked_there() -> None:
    begin: list[dict[str, Any]] = [{"event": "resumed", "step": 9}, {"event": "epoch"}, {"event": "go"}]
    assert marked_steps(records_of([*begin, {"event": "fault"}])) == {*range(10 - BEFORE, 10 + AFTER + 1)}


def test_ranges_that_touch_are_told_as_one() -> None:
    assert as_ranges({1, 2, 5}, 100) == ((100, 299), (500, 599))
    assert as_ranges((), 100) == ()
