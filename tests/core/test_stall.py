"""How long training stood, from made-up commits."""

from __future__ import annotations

import pytest

from engine.core.checks.recoveries import USUAL, Stall, StepLengths, quantile, with_later_steps

MS = 1_000_000


def lengths(*commits_ms: int, begin_ms: int | None = 0) -> StepLengths:
    found = StepLengths()
    if begin_ms is not None:
        found.begin(begin_ms * MS)
    for at_ms in commits_ms:
        found.commit(at_ms * MS, recovered=False)
    return found


def test_a_stall_is_the_gap_less_the_median_step() -> None:
    usual = lengths(900, 1000, 1100, 1230)  # the first step, which warms up, does not count
    assert usual.stall(5330 * MS, 0, 0) == Stall(4000 * MS, 4000 * MS)
    assert str(usual.stall(5330 * MS, 0, 0)) == "4.00 s"


def test_a_step_that_took_less_than_usual_is_no_stall() -> None:
    """A stall of -6.4 ms was printed before."""
    assert lengths(900, 1000).stall(1093 * MS, 0, 0) == Stall(0, 0)


def test_only_the_last_few_steps_are_usual() -> None:
    assert list(lengths(*range(0, 5000, 500), *range(5000, 5001 + 9 * USUAL, 9)).usual) == [9 * MS] * USUAL


def test_what_a_recovery_ends_and_the_step_after_it_are_not_usual() -> None:
    found = lengths(100, 200, 300)
    found.commit(2000 * MS, recovered=True)
    found.commit(2400 * MS, recovered=False)  # restores the shadows
    assert found.stall(3000 * MS, 0, 70 * MS) == Stall(70 * MS, 600 * MS)
    found.commit(2550 * MS, recovered=False)
    assert found.stall(3000 * MS, 0, 70 * MS) == Stall(300 * MS, 300 * MS)


@pytest.mark.parametrize(
    ("before", "resume_ms", "found", "text"),
    [
        (lengths(), 430, Stall(30 * MS, 430 * MS), "at least 30 ms, at most 430 ms"),
        (lengths(400), 430, Stall(30 * MS, 30 * MS), "at least 30 ms, at most 30 ms"),
        (lengths(begin_ms=None), 430, Stall(30 * MS, None), "at least 30 ms"),
        (lengths(100, 200), None, Stall(5700 * MS, None), "at least 5.70 s"),
        (lengths(), None, Stall(30 * MS, None), "at least 30 ms"),
    ],
)
def test_what_is_not_known_is_a_bound(before: StepLengths, resume_ms: int | None, found: Stall, text: str) -> None:
    stall = before.stall(None if resume_ms is None else resume_ms * MS, 6000 * MS, 30 * MS)
    assert stall == found
    assert str(stall) == (text if stall.bound else "30 ms")


def test_steps_that_follow_make_a_stall_known() -> None:
    commits_ns = [0, 90, 190, 290, 392]  # the first step restores the shadows
    assert with_later_steps(Stall(10, 130), commits_ns) == Stall(30, 30)
    assert with_later_steps(Stall(10, 130), commits_ns[:2]) == Stall(10, 130)
    assert with_later_steps(Stall(10, None), commits_ns) == Stall(10, None)


def test_bounds_of_a_quantile_are_quantiles_of_bounds() -> None:
    stalls = [Stall(5, 5), Stall(3, 9), Stall(1, None)]
    assert [quantile(stalls, part) for part in (0.3, 0.5, 1.0)] == [Stall(1, 5), Stall(3, 9), Stall(5, None)]
