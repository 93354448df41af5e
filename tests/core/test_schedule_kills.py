"""Every schedule survives the death of any worker at any point: the rest of the step ends in the same state.

The machine of provenance runs the shipped programs and the shipped planner. In the soak nothing is sampled: each worker
is killed after each number of actions that the whole step takes; `make test` has each eleventh of these kills.
"""

from __future__ import annotations

import pytest

from engine.core.ownership import Grid, Redundancy
from engine.core.program.schedules import SCHEDULES
from tests.core.recovery_cases import ANY_ORDER, Job, assert_faultless, distinct_kills, seeded
from tests.doubles.ordered_machine import OrderedMachine

_WORKERS, _MICROBATCHES = 4, 4
_SHAPES = [(name, v) for name, schedule in SCHEDULES.items() for v in (1, 2) if schedule.takes(v)]


@pytest.mark.timeout(300)  # up to five hundred kills each in the soak; 3 s on an idle machine
@pytest.mark.parametrize("every", [11, pytest.param(1, marks=pytest.mark.soak)])
@pytest.mark.parametrize("redundancy", ["lazy", "eager"])
@pytest.mark.parametrize(("schedule", "stages_per_worker"), _SHAPES)
def test_every_single_kill(schedule: str, stages_per_worker: int, redundancy: Redundancy, every: int) -> None:
    """Each kill that leaves other survivors, or every nth from another one on; transfers on a wire without tags."""
    microbatches = max(_MICROBATCHES, SCHEDULES[schedule].least_microbatches(_WORKERS))
    grid = Grid(_WORKERS * stages_per_worker, microbatches)
    job = Job(grid, schedule, redundancy, stages_per_worker=stages_per_worker, machine_type=OrderedMachine)
    num_kills, first = 0, _SHAPES.index((schedule, stages_per_worker)) + (redundancy == "eager")
    for failure in distinct_kills(job, every, first):
        assert_faultless(failure.finish(seeded(ANY_ORDER)))
        num_kills += 1
    assert num_kills > 2 * grid.stages * grid.microbatches // every, "each worker, before and after most of its actions"


@pytest.mark.parametrize(("schedule", "stages_per_worker"), _SHAPES)
def test_shadows_are_on_other_workers(schedule: str, stages_per_worker: int) -> None:
    for workers in range(2, 9):
        grid = Grid(workers * stages_per_worker, 2 * workers, pipelines=2)
        ownership = Job(grid, schedule, stages_per_worker=stages_per_worker).ownership()
        shadowed = [ownership.shadows_of(*slot) for slot in grid.slots()]
        assert all(len(line) == 1 for line in shadowed)
        assert all(ownership.owner(*slot) not in line for slot, line in zip(grid.slots(), shadowed, strict=True))
        loads = [len(ownership.shadowed_by(worker)) for worker in ownership.workers()]
        assert max(loads) - min(loads) <= 1, "shadows are spread evenly"
