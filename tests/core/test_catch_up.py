"""The catch-up point as moments: where an heir has done again what the victim had done."""

from __future__ import annotations

import pytest

from engine.core.action import parse_action
from engine.core.faults.expansion import catch_up_points
from engine.core.faults.fault import At
from engine.core.job.job import Job
from engine.core.ownership import Grid, fresh, with_shadows
from tests.looped import looped

JOB = Job(stages=3, microbatches=4, pipelines=2, redundancy="none")
BEFORE = fresh(Grid(3, 4, 2))


@looped(
    ("at", "backward"),
    [
        ("1F0@1", "1B0@1"),
        ("1B0@1", "1B0@1"),
        ("1F2@1", "1B0@1"),
        ("1RECV_B1@1", "1B0@1"),
        ("1B1@1", "1B1@1"),
        ("1SEND_B1@1", "1B1@1"),
        ("1B3@1", "1B3@1"),
        ("1REDUCE_GRAD@1", "1B3@1"),
        ("1I0@1", "1B3@1"),  # it ran the plan of another recovery
    ],
)
def test_an_heir_has_caught_up_with_the_last_backward_that_was_begun(at: str, backward: str) -> None:
    points = catch_up_points(JOB, BEFORE, (1, 1), (5, at), 5)
    assert points == (
        At(5, parse_action(backward), "after"),
        At(5, parse_action("1COMMIT@1"), "before"),
    )


def test_where_gradients_are_streamed_the_heir_may_begin_behind_the_last_backward() -> None:
    job = Job(stages=3, microbatches=4, pipelines=2, log_every=1)
    before = with_shadows(BEFORE, "lazy", 1, range(6))
    last, following, commit = catch_up_points(job, before, (1, 1), (5, "1STREAM1@1"), 5)
    assert last == At(5, parse_action("1B1@1"), "after")
    assert following == At(5, parse_action("1B2@1"), "before")
    assert commit == At(5, parse_action("1COMMIT@1"), "before")
    assert len(catch_up_points(job, before, (1, 1), (5, "1B3@1"), 5)) == 2


@pytest.mark.parametrize("at", [(4, "1STEP@1"), (0, "")])
def test_of_a_step_that_the_victim_had_not_begun_nothing_is_lost(at: tuple[int, str]) -> None:
    assert catch_up_points(JOB, BEFORE, (1, 1), at, 5) == ()
