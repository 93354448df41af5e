"""The memory model, against figures that were added up by hand."""

from __future__ import annotations

import pytest

from engine.core.analysis.memory_model import StageBytes, peak_bytes
from engine.core.ownership import Grid, Ownership, Redundancy, one_slot_each, with_shadows
from engine.core.program.build import build_program

# Stage 0 hands on 10 bytes for each microbatch, stage 1 keeps its loss.
SIZES = (StageBytes(weights=1000, residual=70, output=10), StageBytes(weights=2000, residual=90, output=4))


def peaks(redundancy: Redundancy, num_microbatches: int = 2, schedule: str = "1f1b", log_every: int = 0) -> list[int]:
    """Returns the peak of both workers."""
    fresh = one_slot_each(Grid(2, num_microbatches))
    ownership = with_shadows(fresh, redundancy, 1, fresh.workers())
    program = build_program(schedule, ownership, redundancy, log_every=log_every)
    return [peak_bytes(program[worker], worker, ownership, SIZES) for worker in (0, 1)]


def test_without_redundancy() -> None:
    # State, accumulator, and in worker 0 both residuals when the first backward runs; in worker 1 one at a time, with
    # the input it received, the gradient it made before and the one it is making.
    assert peaks("none") == [4 * 1000 + 2 * 70, 4 * 2000 + (90 + 10) + 10 + 10]


def test_a_shadow_has_a_replica_and_a_gradient_more() -> None:
    # At the end of the step: what was handed on stays, and the log's gradient of the other stage is there.
    assert peaks("lazy") == [4 * 1000 + 4 * 2000 + 2 * 10, 4 * 2000 + 4 * 1000 + 2 * 10]


def test_redundant_residuals_stay_until_the_commit() -> None:
    # The input of stage 1 is at hand in worker 0; what it redid includes the loss. Worker 1 redoes stage 0 from data.
    lazy, eager = peaks("lazy"), peaks("eager")
    assert eager == [lazy[0] + 2 * 90, lazy[1] + 2 * 70]


def test_what_is_streamed_is_one_gradient_more_beside_the_log() -> None:
    lazy, streamed = peaks("lazy"), peaks("lazy", log_every=1)
    assert streamed == [lazy[0] + 2000, lazy[1] + 1000]


@pytest.mark.parametrize(("schedule", "at_once"), [("1f1b", 2), ("gpipe", 8)])
def test_the_schedule_decides_how_many_residuals_are_held_at_once(schedule: str, at_once: int) -> None:
    first, _ = peaks("none", 8, schedule)
    handed_on = 6 * 10 if schedule == "1f1b" else 0
    assert first == 4 * 1000 + at_once * 70 + handed_on


def test_neighbours_on_one_worker_share_what_is_between_them() -> None:
    ownership = Ownership(Grid(2, 1), (0, 0))
    actions = build_program("1f1b", ownership)[0]
    assert peak_bytes(actions, 0, ownership, SIZES) == 3 * 1000 + 4 * 2000 + 70 + 90 + 10 + 1000 - 90
