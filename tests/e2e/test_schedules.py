"""Every schedule trains to the bits of the plain loop, on several stages per worker and with split backwards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.core.ownership import directions_of
from engine.core.program.schedules import SCHEDULES
from engine.runtime.agent.run_state import Ending
from tests.e2e.plain_loop import PlainLoop, Texts

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]

WORKERS = 4
SIZES: dict[str, Any] = {
    "microbatch_size": 2,
    "steps": 2,
    "warmup_steps": 1,
    "validate_every": 0,
    "check_pure": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"model": "gpt", "model_args": {"width": 32, "depth": 8}},
    "resnet18": {"model": "resnet18", "model_args": {"width": 16}},
    "all-kinds": {"model": "tests.e2e.state_models:all_kinds"},
}


@functools.cache
def plain(model: str, microbatches: int, pipelines: int) -> list[Texts]:
    """Returns the rows of a model by the plain loop."""
    loop = PlainLoop(Job(**SIZES | MODELS[model], microbatches=microbatches, pipelines=pipelines))
    return [row for step in range(loop.job.steps) for row in loop.step(step)]


def cases() -> Iterator[Any]:
    """Yields each schedule with each model; `make test` has every fifth schedule with one of them, the soak all.

    `test_schedule_kills.py` has each schedule with a kill, held against a run in one stage, and `test_same_bits.py` has
    runs in stages, held against the plain loop: together they say the same of every schedule.
    """
    pairs = (("gpt", 9), ("resnet18", 8), ("gpt", 8), ("all-kinds", 9))
    for number, schedule in enumerate(SCHEDULES):
        for place, each in enumerate(pairs):
            is_short = number % 5 == 4 and place == number % 4
            yield pytest.param(schedule, *each, marks=[] if is_short else [pytest.mark.soak])


@pytest.mark.parametrize(("schedule", "model", "microbatches"), [*cases()])
def test_every_schedule_trains_to_the_same_bits(
    schedule: str, model: str, microbatches: int, train: Callable[..., Ending]
) -> None:
    stages_per_worker = 2 if SCHEDULES[schedule].takes(2) else 1
    shape = {"stages": WORKERS * stages_per_worker, "stages_per_worker": stages_per_worker}
    shape["pipelines"] = directions_of(schedule)
    job = Job(**SIZES | MODELS[model] | shape, microbatches=microbatches, schedule=schedule)
    rows = [row.texts() for row in train(job).view.run_state.rows]
    assert rows == plain(model, microbatches, job.pipelines)
