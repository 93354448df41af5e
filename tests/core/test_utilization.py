"""What a dry run says of each worker over time agrees with what it says in sum."""

from __future__ import annotations

from statistics import fmean

import pytest

from engine.core.ownership import Grid, Redundancy, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import bubbles, dry_run, stash_curves
from tests.core.drawing import program_of


def test_a_small_program() -> None:
    run = dry_run(program_of("0: 0F0 0SEND_F0 0RECV_B0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0"), fresh(Grid(2, 1)))
    assert bubbles(run) == {0: pytest.approx(0.5), 1: pytest.approx(0.5)}
    assert stash_curves(run) == {0: [(0, 0), (1, 1), (6, 0), (6, 0)], 1: [(0, 0), (2, 1), (4, 0), (6, 0)]}


@pytest.mark.parametrize(
    ("schedule", "v", "redundancy"),
    [("1f1b", 1, "none"), ("1f1b", 1, "eager"), ("zbv", 2, "none"), ("zb1p", 1, "lazy")],
)
def test_curves_add_up_to_the_figures(schedule: str, v: int, redundancy: Redundancy) -> None:
    ownership = fresh(Grid(4 * v, 8), v, "v")
    ownership = with_shadows(ownership, redundancy, 1, ownership.workers())
    run = dry_run(build_program(schedule, ownership, redundancy), ownership)
    assert fmean(bubbles(run).values()) == pytest.approx(run.bubble)
    curves = stash_curves(run)
    assert {worker: max(stashed for _, stashed in curve) for worker, curve in curves.items()} == run.peak_stash
    for curve in curves.values():
        assert [at for at, _ in curve] == sorted(at for at, _ in curve)
        assert curve[-1] == (run.makespan, 8 * v if redundancy == "eager" else 0)
