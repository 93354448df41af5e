"""Real runs of stages in shards: the bits of whole stages, resumed too, and when workers die."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.core.checkpoint_rules import Resumption
from engine.core.checks.trajectory import first_difference
from engine.core.errors import ExitCode
from engine.core.job.job import Job
from engine.core.job.memory_model import StageBytes
from engine.runtime.agent.run_state import Ending
from engine.runtime.process.fork_client import ForkServer
from tests.e2e import plain_loop
from tests.e2e.kill_forecast import plan_kills
from tests.e2e.kill_runs import SETTINGS, Runs, job_of
from tests.e2e.test_real_kills import STEPS_TO_HEAL
from tests.kills import parse_kill
from tests.runtime.kept_states import keeping_all, kept_states, run_and_keep
from tests.runtime.thread_runs import run_in_threads

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]

SMALL: dict[str, Any] = {
    "microbatches": 4,
    "microbatch_size": 2,
    "steps": 3,
    "warmup_steps": 1,
    "validate_every": 2,
    "validation_microbatches": 2,
    "clip_norm": 0.1,
    "redundancy": "none",
    "fsdp": 1,
    "check_pure": False,
}


GPT: dict[str, Any] = {
    **{"model": "gpt", "model_args": {"width": 32, "tied": True}, "pipelines": 2},
    **{"stages": 4, "stages_per_worker": 2, "schedule": "zbv"},
}
RESNET: dict[str, Any] = {
    **{"model": "resnet18", "model_args": {"width": 8}, "pipelines": 3, "microbatches": 2},
    **{"stages": 1, "activation_checkpoint": 3, "optimizer": "sgd", "optimizer_args": {"momentum": 0.9}},
}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs."""
    return Runs(tmp_path_factory.mktemp("fsdp"), server)


@pytest.mark.parametrize(
    "fields",
    [pytest.param(GPT, id="gpt-zbv-x2"), pytest.param(RESNET, id="resnet18-x3", marks=pytest.mark.soak)],
)
def test_shards_change_no_bit_and_are_resumed_as_whole_stages(
    runs: Runs, fields: dict[str, Any], tmp_path: Path
) -> None:
    job = Job(**SMALL | fields)
    ending, events = runs.run(keeping_all(job, tmp_path))
    assert ending.error is None, ending.error
    run_state = ending.view.run_state
    loop = plain_loop.PlainLoop(job)
    assert [row.texts() for row in run_state.rows] == [row for step in range(job.steps) for row in loop.step(step)]
    assert run_state.validations[job.steps - 1] == loop.validate()
    kept = [(event["step"], event["parts"]) for event in events if event["event"] == "kept"]
    assert kept == [(step, len(run_state.layers) * job.pipelines) for step in range(job.steps)]
    check_sizes([StageBytes(*rest) for event in events if event["event"] == "finished" for _, *rest in event["sizes"]])
    ops = {event["action"].lstrip("0123456789").split("@")[0] for event in events if event["event"] == "action"}
    assert {"UNSHARD", "RESHARD"} <= ops
    cut = replace(job, fsdp=0, stages=3, stages_per_worker=1, schedule="1f1b")
    for origin in kept_states(job, ending, tmp_path)[:-1]:
        check_rest(run_in_threads(cut, origin=origin), ending, origin)


def check_sizes(sizes: list[StageBytes]) -> None:
    """Asserts that the shards of all stages together have the whole weights once."""
    assert sum(each.weights for each in sizes) == sum({each.whole for each in sizes})


def check_rest(resumed: Ending, whole: Ending, origin: Resumption) -> None:
    assert (resumed.outcome, resumed.error) == ("finished", None)
    rest = [row for row in whole.view.run_state.rows if row.step > origin.step]
    assert first_difference(resumed.view.run_state.rows, rest) is None


def test_whole_stages_are_resumed_in_shards_also_where_gradients_are_missing(runs: Runs, tmp_path: Path) -> None:
    optimizer: dict[str, Any] = {"optimizer": "sgd", "optimizer_args": {"momentum": 0.9, "weight_decay": 0.5}}
    job = Job(**SMALL, **optimizer, model="tests.runtime.unused_models:routed", pipelines=2, stages=1)
    whole, origins = run_and_keep(replace(job, fsdp=0, stages=3), tmp_path)
    resumed, _ = runs.run(job, origin=origins[0])
    check_rest(resumed, whole, origins[0])


def test_a_death_ends_the_run_and_says_what_is_lost(runs: Runs) -> None:
    job = Job(**SMALL, model="mlp", pipelines=2, stages=1)
    ending, _ = runs.run(job, [parse_kill("1:0:UNSHARD:before@1", job)])
    assert ending.exit_code == ExitCode.STATE_LOST
    assert "the state of stage 0 is lost" in str(ending.error)
    assert "last committed step 0" in str(ending.error)


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.soak) for name in ("mlp-shards-x2", "gpt-shards-x2")), "mlp-shards-x4"],
)
def test_deaths_are_taken_over_with_the_bits_of_whole_stages(runs: Runs, name: str) -> None:
    kills = plan_kills(job_of(name), (), seed=1, most=2)
    assert len(kills) == 2
    assert runs.strike(replace(job_of(name), steps=kills[-1].step + STEPS_TO_HEAL), kills) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_sixty_deaths_are_taken_over(runs: Runs) -> None:
    names, count = [name for name in SETTINGS if job_of(name).fsdp], 0
    for seed in itertools.count(2):
        job = job_of(names[seed % len(names)])
        kills = plan_kills(job, (), seed)
        assert runs.strike(job, kills) == [], (names[seed % len(names)], seed)
        count += len(kills)
        if count >= 60:
            break
