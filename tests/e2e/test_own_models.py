"""Skip connections and whole batches in real runs: the same bits for every cut of the model and every death.

The reference is a plain loop without either: its layers pass all values on, and its data cuts each batch.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.core.messages import Evaluation
from engine.runtime.agent.run_state import Ending
from engine.runtime.process.fork_client import ForkServer
from tests.e2e import plain_loop
from tests.e2e.kill_runs import Event, Runs
from tests.e2e.user_batches import MICROBATCHES, VALIDATION_MICROBATCHES
from tests.kills import parse_kill

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180), pytest.mark.usefixtures("shared_etcd")]

SMALL: dict[str, Any] = {
    "microbatches": MICROBATCHES,
    "microbatch_size": 2,
    "steps": 3,
    "warmup_steps": 1,
    "validate_every": 2,
    "validation_microbatches": VALIDATION_MICROBATCHES,
}
U_SHAPE = {**SMALL, "model": "tests.e2e.user_models:u_shape", "data": "synthetic"}
NESTED = {**SMALL, "model": "tests.e2e.user_batches:nested", "data": "tests.e2e.user_batches:Batches"}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs."""
    return Runs(tmp_path_factory.mktemp("skips"), server)


@functools.cache
def plain(
    model: str, data: str, pipelines: int = 1
) -> tuple[list[plain_loop.Texts], dict[int, tuple[Evaluation, ...]]]:
    """Returns the rows and the validations of a job that has neither skips nor whole batches, by the plain loop."""
    loop = plain_loop.PlainLoop(Job(**SMALL, model=model, data=data, pipelines=pipelines))
    rows, validations = [], {}
    for step in range(loop.job.steps):
        rows += loop.step(step)
        if step in (1, 2):
            validations[step] = loop.validate()
    return rows, validations


def check(ending: Ending, expected: tuple[Any, Any]) -> None:
    assert ending.error is None, ending.error
    run_state = ending.view.run_state
    assert ([row.texts() for row in run_state.rows], run_state.validations) == expected


def u_shape_by_hand() -> tuple[Any, Any]:
    return plain("tests.e2e.user_models:u_shape_by_hand", "synthetic")


def victims(events: list[Event]) -> list[int]:
    return [event["of"] for event in events if event["event"] == "fault"]


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"stages": 1}, marks=pytest.mark.soak),
        {"stages": 2, "activation_checkpoint": 2},
        pytest.param({"stages": 3}, marks=pytest.mark.soak),
        pytest.param({"stages": 4, "schedule": "zb1p"}, marks=pytest.mark.soak),
        {"stages": 4, "stages_per_worker": 2, "schedule": "interleaved"},
    ],
)
def test_skips_equal_layers_that_pass_all_on_by_themselves(runs: Runs, fields: dict[str, Any]) -> None:
    ending, _ = runs.run(Job(**U_SHAPE | fields))
    check(ending, u_shape_by_hand())


@pytest.mark.parametrize("kill", ["1:1:B:2", "1:3:F:1"])  # between the two ends of the skips, and at one
def test_a_kill_changes_nothing_about_skips(runs: Runs, kill: str) -> None:
    job = Job(**U_SHAPE, stages=4)
    ending, events = runs.run(job, [parse_kill(kill, job)])
    assert victims(events) == [int(kill[2])]
    check(ending, u_shape_by_hand())


@pytest.mark.parametrize(("pipelines", "kill"), [(2, ""), (1, "1:0:B:1"), (1, "1:2:F:2")])
def test_whole_batches_equal_microbatches_cut_by_hand(runs: Runs, pipelines: int, kill: str) -> None:
    """The first and the last stage load data; the heir of either loads the batch again."""
    job = Job(**NESTED, stages=3, pipelines=pipelines)
    ending, events = runs.run(job, [parse_kill(kill, job)] if kill else ())
    assert victims(events) == ([int(kill[2])] if kill else [])
    check(ending, plain("tests.e2e.user_batches:flat", "tests.e2e.user_batches:Microbatches", pipelines))
