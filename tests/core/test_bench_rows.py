"""Rows of benchmarks: what is measured from stamps, and when a goal counts as met."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.bench.figures.rows import (
    COLUMNS,
    PIPELINE_GOAL_OF_IDEAL,
    Row,
    Stamps,
    ideal_seconds,
    mean_sleeps,
    overhead_rows,
    paired_row,
    pipeline_rows,
    prediction_row,
    schedule_rows,
    seconds_taken,
)

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
    of_ideal, middle, low, high = pipeline_rows("case", ours, peer)
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
    assert mean_sleeps(parts) == mean_sleeps(whole) == pytest.approx((0.01, 0.02))
    assert ideal_seconds(parts) == ideal_seconds(whole)


@pytest.mark.parametrize(("factor", "met"), [(1.02, True), (1.021, False)])
def test_a_schedule_stands_beside_its_dry_runs_and_its_peer(factor: float, met: bool) -> None:
    times = [factor, factor, 2], [1, 1, 1], [0.9, 0.9, 0.9], "theirs", [1.1, 1.2, 1.3]
    of_dry_run, of_sleeps, middle, low, high = schedule_rows("case", *times)
    assert (of_dry_run.metric, of_dry_run.met) == ("iteration s, beside its dry run", met)
    assert (of_dry_run.ours, of_dry_run.peer, of_dry_run.ratio) == (factor, 1, factor)
    assert (of_sleeps.metric, of_sleeps.met) == ("iteration s, beside its dry run of sleeps alone", None)
    assert of_sleeps.ratio == pytest.approx(factor / 0.9)
    assert (middle.metric, middle.peer) == ("iteration s, beside theirs", 1.2)
    assert (low.goal, low.met, high.goal) == (1.0, True, None)
    assert schedule_rows("case", *times, has_goal=False)[3].met is None


@pytest.mark.parametrize(("factor", "met"), [(1.0, True), (PIPELINE_GOAL_OF_IDEAL + 0.001, False)])
def test_the_goal_of_the_ideal_is_for_ours(factor: float, met: bool) -> None:
    row = pipeline_rows("case", [iteration(IDEAL_MS * factor)], [iteration(IDEAL_MS)])[0]
    assert row.met is met


def test_slower_means_that_the_whole_interval_lies_above_one() -> None:
    slower = [iteration(value) for value in (351, 352, 353)]
    mixed = [iteration(value) for value in (349, 352, 353)]
    peer = [iteration(350)] * 3
    assert pipeline_rows("case", slower, peer)[2].met is False
    assert pipeline_rows("case", mixed, peer)[2].met is True


def test_real_compute_has_no_ideal() -> None:
    real = [[Stamps(0, 350 * MS), Stamps(MS, 351 * MS)]]
    assert [row.metric for row in pipeline_rows("case", real, real)] == [
        "iteration s",
        "iteration s, low end of 95 %",
        "iteration s, high end of 95 %",
    ]


def test_pairs_are_compared_pair_by_pair() -> None:
    # The machine was twice as slow during the second pair: the medians are far apart, the ratios are not.
    row = paired_row("case", "launch s", [1.0, 2.0, 1.0], [4.0, 8.0, 4.0], goal=1 / 3)
    assert (row.ours, row.peer, row.ratio, row.met, row.n) == (1.0, 4.0, 0.25, True, 3)
    assert paired_row("case", "launch s", [1.0], [2.0], goal=1 / 3).met is False


@pytest.mark.parametrize(("ours", "met"), [(1.05, True), (1.0501, False)])
def test_an_overhead_stands_beside_its_floor_and_the_goal_is_for_ours(ours: float, met: bool) -> None:
    beside_none, beside_floor = overhead_rows("case", [ours * 3, 2 * ours, 9.0], [3.0, 2.0, 1.0], 0.03, 0.05)
    assert (beside_none.ours, beside_none.peer, beside_none.met) == (ours * 3, 2.0, None)
    assert beside_floor.ours == pytest.approx(ours)
    assert (beside_floor.peer, beside_floor.goal) == (1.03, 1.05)
    assert beside_floor.ratio == pytest.approx(ours / 1.03)
    assert (beside_floor.met, beside_floor.n) == (met, 3)


@pytest.mark.parametrize(("found", "met"), [(1.9, False), (1.91, True), (2.0, True), (2.09, True), (2.11, False)])
def test_a_prediction_may_miss_by_the_goal_on_either_side(found: float, met: bool) -> None:
    row = prediction_row("case", "ratio", found, 2.0, 1.05, 1)
    assert (row.ours, row.peer, row.ratio, row.met) == (found, 2.0, found / 2, met)


def test_a_row_as_plain_values_has_the_columns_in_order() -> None:
    values = Row("case", "metric", 1.23456789, 2.0, 0.5, None, None, 3).as_dict()
    assert tuple(values) == COLUMNS == ("case", "metric", "ours", "peer", "ratio", "goal", "met", "n")
    assert list(values.values()) == ["case", "metric", 1.23457, 2.0, 0.5, None, None, 3]
