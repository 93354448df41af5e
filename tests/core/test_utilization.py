"""What a dry run says of each worker agrees with what it says in sum."""

from __future__ import annotations

from statistics import fmean

import pytest

from engine.core.ownership import Grid, Redundancy, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import bubbles, dry_run
from tests.core.drawing import program_of


def test_a_small_program() -> None:
    run = dry_run(program_of("0: 0F0 0SEND_F0 0RECV_B0 0B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0"), fresh(Grid(2, 1)))
    assert bubbles(run) == {0: pytest.approx(0.5), 1: pytest.approx(0.5)}


@pytest.mark.parametrize(
    ("schedule", "v", "redundancy"),
    [("1f1b", 1, "none"), ("1f1b", 1, "eager"), ("zbv", 2, "none"), ("zb1p", 1, "lazy")],
)
def test_the_shares_of_the_workers_add_up_to_the_figure(schedule: str, v: int, redundancy: Redundancy) -> None:
    ownership = fresh(Grid(4 * v, 8), v, "v")
    ownership = with_shadows(ownership, redundancy, 1, ownership.workers())
    run = dry_run(build_program(schedule, ownership, redundancy), ownership)
    assert fmean(bubbles(run).values()) == pytest.approx(run.bubble)
