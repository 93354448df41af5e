"""The cut of a model, its schedule and its workers change no bit, compared with a loop without the engine."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.core.messages import Evaluation
from engine.core.ownership import Grid, Ownership
from engine.runtime.agent.run_state import Ending
from tests.e2e.plain_loop import Mistake, PlainLoop, Texts
from tests.e2e.plain_loop import train as train_plainly

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

Train = Callable[..., Ending]

SMALL: dict[str, Any] = {
    "microbatches": 4,
    "microbatch_size": 2,
    "steps": 2,
    "warmup_steps": 1,
    "validate_every": 2,
    "validation_microbatches": 2,
}
# The check of pure forwards runs each of them before training; it stays on where it might leave a trace in the bits.
QUICK: dict[str, Any] = SMALL | {"check_pure": False}
WORKLOADS: dict[str, dict[str, Any]] = {
    "gpt": QUICK | {"model": "gpt", "model_args": {"width": 32}},
    "gpt-tied": QUICK | {"model": "gpt", "model_args": {"width": 32, "tied": True}},
    "gpt-bfloat16": QUICK | {"model": "gpt", "model_args": {"width": 32}, "dtype": "bfloat16"},
    "resnet18": SMALL | {"model": "resnet18", "model_args": {"width": 8}},
    "mlp": SMALL
    | {
        "model": "mlp",
        "model_args": {"dropout": 0.2, "depth": 5},
        "steps": 3,  # one more than is validated
        "optimizer": "sgd",
        "optimizer_args": {"momentum": 0.9},
        "lr_schedule": "linear",
        "clip_norm": 0.5,
    },
    "tuples": QUICK | {"model": "tests.e2e.user_models:tuples", "data": "synthetic"},
    "transposing": QUICK | {"model": "tests.e2e.user_models:transposing", "data": "synthetic"},
    "in-place": SMALL | {"model": "tests.e2e.user_models:in_place", "data": "synthetic"},
    "all-kinds": SMALL | {"model": "tests.e2e.state_models:all_kinds", "data": "synthetic"},
}
# Workload, stages, partition, schedule, activation checkpoint.
CUTS = [
    ("gpt", 3, "1,4", "gpipe", 2),
    ("gpt-tied", 4, "parameters", "gpipe", 0),
    ("resnet18", 4, "2,3,7", "1f1b", 1),
    ("mlp", 2, "profile", "1f1b", 0),
    ("mlp", 3, "type:hidden", "eager-1f1b", 1),
    ("gpt-bfloat16", 3, "parameters", "1f1b", 2),
    ("transposing", 4, "uniform", "gpipe", 3),
    ("in-place", 2, "1", "1f1b", 2),
    ("all-kinds", 4, "uniform", "zb1p", 1),
]
# The rest of each number of stages of each workload, in the soak.
MORE_CUTS = [
    ("gpt", 4, "uniform", "eager-1f1b", 3),
    ("mlp", 1, "", "gpipe", 3),
    ("tuples", 3, "uniform", "1f1b", 0),
    ("all-kinds", 2, "parameters", "1f1b", 2),
    ("gpt", 1, "uniform", "gpipe", 0),
    ("gpt", 2, "parameters", "1f1b", 1),
    ("gpt", 4, "uniform", "1f1b", 3),
    ("gpt-tied", 1, "parameters", "1f1b", 1),
    ("gpt-tied", 2, "2", "gpipe", 2),
    ("gpt-tied", 3, "uniform", "1f1b", 3),
    ("resnet18", 1, "", "1f1b", 2),
    ("resnet18", 2, "uniform", "gpipe", 3),
    ("resnet18", 3, "parameters", "1f1b", 0),
    ("mlp", 4, "1,2,5", "1f1b", 2),
    ("tuples", 1, "uniform", "gpipe", 0),
    ("tuples", 2, "parameters", "1f1b", 2),
    ("transposing", 1, "uniform", "1f1b", 0),
    ("all-kinds", 1, "uniform", "gpipe", 3),
    ("all-kinds", 3, "1,4", "1f1b", 0),
]
TWO_PIPELINES = Job(**WORKLOADS["gpt-tied"] | {"stages": 2, "pipelines": 2})
THREE_PIPELINES = Job(**WORKLOADS["resnet18"] | {"stages": 1, "pipelines": 3, "microbatches": 2})


@functools.cache
def plain(workload: str) -> tuple[list[Texts], dict[int, tuple[Evaluation, ...]]]:
    """Returns the rows and the validations of a workload by the plain loop."""
    loop = PlainLoop(Job(**WORKLOADS[workload]))
    rows, validations = [], {}
    for step in range(loop.job.steps):
        rows += loop.step(step)
        if (step + 1) % loop.job.validate_every == 0 or step == loop.job.steps - 1:
            validations[step] = loop.validate()
    return rows, validations


def rows_of(ending: Ending) -> list[Texts]:
    return [row.texts() for row in ending.view.run_state.rows]


@pytest.mark.parametrize(
    ("workload", "stages", "partition", "schedule", "activation_checkpoint"),
    [*CUTS, *(pytest.param(*each, marks=pytest.mark.soak) for each in MORE_CUTS)],
)
def test_every_cut_equals_the_plain_loop(
    train: Train, workload: str, stages: int, partition: str, schedule: str, activation_checkpoint: int
) -> None:
    job = Job(
        **WORKLOADS[workload],
        stages=stages,
        partition=partition,
        schedule=schedule,
        activation_checkpoint=activation_checkpoint,
    )
    ending = train(job)
    run_state = ending.view.run_state
    rows, validations = plain(workload)
    assert len(run_state.starts) == stages
    assert partition[:1].isalpha() or run_state.starts == (0, *map(int, partition.split(",") if partition else ()))
    assert len(rows) == job.steps * len(run_state.layers)
    assert rows_of(ending) == rows
    assert run_state.validations == validations


def test_another_seed_gives_another_run(train: Train) -> None:
    """That a seed gives the same run again, the cuts show: each is a run of its own, and all equal one loop."""
    other = rows_of(train(Job(**WORKLOADS["mlp"], stages=2, seed=1)))
    assert all(a[2] != b[2] for a, b in zip(plain("mlp")[0], other, strict=True))  # weights of each layer and step


@pytest.mark.parametrize(
    ("owners", "ranks"),
    [
        pytest.param((0, 1, 2, 3), (0, 1, 2, 3), marks=pytest.mark.soak),
        pytest.param((0, 1, 2, 3), (2, 0, 3, 1), marks=pytest.mark.soak),
        pytest.param((3, 1, 0, 2), (0, 1, 2, 3), marks=pytest.mark.soak),
        ((1, 2, 3, 0), (3, 2, 1, 0)),
    ],
)
def test_two_pipelines_are_equal_whichever_worker_has_which_slot_and_rank(
    train: Train, owners: tuple[int, ...], ranks: tuple[int, ...]
) -> None:
    ending = train(TWO_PIPELINES, Ownership(Grid(stages=2, microbatches=4, pipelines=2), owners), ranks)
    slots = {each.worker: each.slots for each in ending.view.workers}
    assert slots == {worker: (divmod(index, 2),) for index, worker in enumerate(owners)}
    assert rows_of(ending) == train_plainly(TWO_PIPELINES)


@pytest.mark.parametrize("model", ["user_models:mixed_dtypes", "state_models:all_kinds"])
def test_parameters_and_buffers_of_all_kinds_are_added_and_handed_round(train: Train, model: str) -> None:
    job = Job(**SMALL | {"model": f"tests.e2e.{model}", "stages": 2, "pipelines": 2})
    assert rows_of(train(job)) == train_plainly(job)


def test_three_pipelines_are_added_in_their_order(train: Train) -> None:
    grid = Grid(stages=1, microbatches=2, pipelines=3)
    rows = rows_of(train(THREE_PIPELINES, Ownership(grid, (2, 0, 1)), (1, 2, 0)))
    assert rows == train_plainly(THREE_PIPELINES)
    assert rows != train_plainly(THREE_PIPELINES, Mistake(pipelines_backwards=True))


@pytest.mark.parametrize(
    ("workload", "mistake"),
    [
        ("gpt", Mistake(microbatches_backwards=True)),
        ("gpt", Mistake(step_of_keys=1)),
        ("gpt-tied", Mistake(tie_keeps_first_use_only=True)),
        ("resnet18", Mistake(buffers_counted_twice=True)),
    ],
)
def test_a_planted_mistake_is_seen(workload: str, mistake: Mistake) -> None:
    assert train_plainly(Job(**WORKLOADS[workload]), mistake) != plain(workload)[0]


def test_the_order_of_microbatches_shows_in_weights_before_it_shows_in_losses() -> None:
    job = Job(**WORKLOADS["gpt"] | {"steps": 1})
    right, wrong = train_plainly(job), train_plainly(job, Mistake(microbatches_backwards=True))
    assert any(a[2] != b[2] for a, b in zip(right, wrong, strict=True))
