"""Rows of benchmarks: what is measured from stamps, and when a goal counts as met."""

from __future__ import annotations

from dataclasses import replace
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.bench.figures import (
    COLUMNS,
    PIPELINE_GOAL_OF_IDEAL,
    BenchRow,
    Stamps,
    at_most,
    ideal_seconds,
    in_turns,
    interval_rows,
    limit_row,
    median_interval,
    overhead_rows,
    paired_row,
    pipeline_rows,
    ratio_row,
    row,
    seconds_taken,
    verdict_on,
)
from engine.core.random_key import random_key
from tests.looped import looped

MS = 1_000_000
IDEAL_MS = (8 + 4 - 1) * 30  # P = 4, M = 8, F = 10 ms, B = 20 ms


def iteration(took_ms: float, first_ms: int = 0) -> list[Stamps]:
    """Returns the stamps of 4 workers and 8 microbatches; worker 0 starts first, worker 3 ends last."""
    return [
        Stamps(
            (first_ms + worker) * MS,
            round((first_ms + took_ms - 3 + worker) * MS),
            (9 * MS, 11 * MS) * 4,
            (19 * MS, 21 * MS) * 4,
        )
        for worker in range(4)
    ]


def test_an_iteration_lasts_from_the_first_start_to_the_last_end() -> None:
    assert seconds_taken(iteration(350, first_ms=12345)) == 0.35


def test_the_ideal_is_made_of_what_the_layers_took() -> None:
    assert ideal_seconds(iteration(350)) == pytest.approx(IDEAL_MS / 1e3)


def test_a_case_gets_its_share_of_the_ideal_and_its_interval() -> None:
    ours = [iteration(IDEAL_MS * factor) for factor in (1.01, 1.01, 1.03)]
    peer = [iteration(IDEAL_MS * factor) for factor in (1.04, 1.05, 1.05)]
    of_ideal, middle, low, high = pipeline_rows("case", ours, peer, "", has_ideal=True)
    assert of_ideal.ours == pytest.approx(1.01)
    assert of_ideal.peer == pytest.approx(1.05)
    assert (of_ideal.goal, of_ideal.met, of_ideal.n) == (PIPELINE_GOAL_OF_IDEAL, True, 3)
    assert middle.ratio == pytest.approx(1.01 / 1.04)
    assert low.ratio <= middle.ratio <= high.ratio
    assert (low.goal, low.met) == (1.0, True)
    assert (middle.met, high.met) == (None, None)


def test_a_backward_may_sleep_in_parts() -> None:
    whole = iteration(350)
    parts = [replace(each, backwards_ns=(10 * MS,) * 16) for each in whole]
    assert ideal_seconds(parts) == ideal_seconds(whole)


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (PIPELINE_GOAL_OF_IDEAL + 0.001, False)])
def test_the_goal_of_the_ideal_is_for_ours(factor: float, met: bool) -> None:
    found = pipeline_rows("case", [iteration(IDEAL_MS * factor)], [iteration(IDEAL_MS)], "", has_ideal=True)[0]
    assert found.met is met


def test_slower_means_that_the_whole_interval_lies_above_one() -> None:
    slower = [iteration(value) for value in (351, 352, 353)]
    mixed = [iteration(value) for value in (349, 352, 353)]
    peer = [iteration(350)] * 3
    assert pipeline_rows("case", slower, peer, "", has_ideal=True)[2].met is False
    assert pipeline_rows("case", mixed, peer, "", has_ideal=True)[2].met is True


@pytest.mark.parametrize(("factor", "met"), [(0.97, True), (0.971, False)])
def test_a_schedule_may_have_a_goal_beside_the_peer(factor: float, met: bool) -> None:
    ours, peer = [iteration(1000 * factor)], [iteration(1000)]
    rows = pipeline_rows("case", ours, peer, "", has_ideal=True, goal=0.97)
    assert [(each.goal, each.met) for each in rows[1:]] == [(0.97, met), (1.0, True), (None, None)]


def test_real_compute_has_no_ideal() -> None:
    real = [[Stamps(0, 350 * MS), Stamps(MS, 351 * MS)]]
    assert [each.metric for each in pipeline_rows("case", real, real, ", remark", has_ideal=False)] == [
        "iteration s, remark",
        "iteration s, remark, low end of 95 %",
        "iteration s, remark, high end of 95 %",
    ]


def test_the_cpu_time_of_all_workers_stands_beside_the_peers() -> None:
    ours, peer = ([[Stamps(0, 350 * MS, cpu_ns=each * MS)] * 4] for each in (10, 8))
    found = pipeline_rows("case", ours, peer, "", has_ideal=False)[-1]
    assert (found.metric, found.ours, found.ratio, found.met) == ("CPU of all workers s", 0.04, 1.25, False)


def test_pairs_are_compared_pair_by_pair() -> None:
    # The machine was twice as slow during the second pair: the medians are far apart, the ratios are not.
    found = paired_row("case", "launch s", [1.0, 2.0, 1.0], [4.0, 8.0, 4.0], goal=1 / 3)
    assert (found.ours, found.peer, found.ratio, found.met, found.n) == (1.0, 4.0, 0.25, True, 3)
    assert paired_row("case", "launch s", [1.0], [2.0], goal=1 / 3).met is False


@pytest.mark.parametrize(("ours", "met"), [(1.05, True), (1.0501, False)])
def test_an_overhead_stands_beside_its_floor_and_the_goal_is_for_ours(ours: float, met: bool) -> None:
    beside_none, beside_floor = overhead_rows("case", [ours * 3, 2 * ours, 9.0], [3.0, 2.0, 1.0], 0.03, 0.05)
    assert (beside_none.ours, beside_none.peer, beside_none.met) == (ours * 3, 2.0, None)
    assert beside_floor.ours == pytest.approx(ours)
    assert (beside_floor.peer, beside_floor.goal) == (1.03, 1.05)
    assert beside_floor.ratio == pytest.approx(ours / 1.03)
    assert (beside_floor.met, beside_floor.n) == (met, 3)


def test_a_row_as_plain_values_has_the_columns_in_order() -> None:
    values = BenchRow("case", "metric", 1.23456789, 2.0, 0.5, None, None, 3).as_dict()
    assert tuple(values) == COLUMNS == ("case", "metric", "ours", "peer", "ratio", "goal", "met", "n")
    assert list(values.values()) == ["case", "metric", 1.23457, 2.0, 0.5, None, None, 3]


def test_sides_take_turns_and_each_round_begins_with_another() -> None:
    turn = count(1)
    taken = in_turns(dict.fromkeys("abc", lambda: next(turn)), 3)
    assert taken == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_a_goal_is_for_our_figure_or_for_the_ratio() -> None:
    assert (row("case", "s", 3.0, 2.0, 1, goal=3.0).met, row("case", "s", 3.0, 2.0, 1, goal=2.9).met) == (True, False)
    assert row("case", "s", 3.0, 2.0, 1).met is None
    assert (ratio_row("case", "s", 3.0, 2.0, 1, 1.5).met, ratio_row("case", "s", 3.0, 2.0, 1, 1.4).met) == (True, False)


def test_a_limit_is_for_a_figure_that_so_many_do_not_exceed() -> None:
    taken = [each / 1000 for each in range(200, 0, -1)]
    found = limit_row("case", "p99 s", taken, 0.99, 0.1)
    assert (found.ours, found.peer, found.met, found.n) == (0.198, 0.1, False, 200)
    assert limit_row("case", "p50 s", taken, 0.5, 0.1).met


@given(values=st.lists(st.floats(0.5, 2.0), min_size=1, max_size=25))
@settings(max_examples=20)
def test_the_interval_lies_around_the_median_and_is_the_same_each_time(values: list[float]) -> None:
    middle, low, high = median_interval(values)
    assert min(values) <= low <= middle <= high <= max(values)
    assert median_interval([value * 2 for value in values]) == (middle * 2, low * 2, high * 2)


def test_the_interval_holds_the_true_median_about_as_often_as_promised() -> None:
    # 60 samples of 20 uniform numbers with a known median: a 95 % interval may miss it a few times.
    samples = [[random_key(0, "sample", one, each) / 2**63 for each in range(20)] for one in range(60)]
    intervals = [median_interval(sample) for sample in samples]
    assert 52 <= sum(low <= 0.5 <= high for _, low, high in intervals) <= 60
    assert median_interval([1.5] * 20) == (1.5, 1.5, 1.5)


@pytest.mark.parametrize(
    ("ours", "met", "verdict"),
    [([1.0, 1.01, 1.0], True, "yes"), ([1.2, 1.1, 1.3], False, "no"), ([0.9, 1.2, 1.0], None, "inconclusive")],
)
def test_an_interval_that_spans_the_goal_gives_no_verdict(ours: list[float], met: bool | None, verdict: str) -> None:
    main, low, high = interval_rows("c", "step s", ours, [1.0] * 3, 1.05)
    assert (main.met, verdict_on(main)) == (met, verdict)
    assert low.ratio <= main.ratio <= high.ratio
    assert (verdict_on(low), verdict_on(high)) == ("", "")


def test_one_pair_gives_no_verdict() -> None:
    assert interval_rows("c", "step s", [1.0], [1.0], 1.05)[0].met is None


def test_no_round_begins_that_would_end_too_late() -> None:
    seconds = iter([0.0, 10.0, 10.0, 22.0, 22.0, 30.0, 30.0])
    taken = in_turns({"a": lambda: 1}, 9, 33.0, lambda: next(seconds))
    assert taken == {"a": [1, 1]}, "the second took 12 s, and 22 + 12 > 33"
    assert in_turns({"a": lambda: 1}, 9, -1.0) == {"a": [1]}, "there is always one"


@looped(("part", "figure"), [(0.01, 1), (0.5, 3), (0.6, 3), (0.61, 4), (0.99, 5), (1.0, 5)])
def test_a_quantile_is_the_smallest_figure_that_this_part_does_not_exceed(part: float, figure: float) -> None:
    assert at_most([5, 3, 1, 4, 2], part) == figure
