"""Real runs of stages in shards over the pipelines: the bits of whole stages, and a clean end when a worker dies."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.config.job import Job
from engine.core.errors import ExitCode
from engine.runtime.process.fork_client import ForkServer
from tests.e2e import plain_loop
from tests.e2e.kill_runs import Runs
from tests.kills import parse_kill

# Each worker imports torch's FSDP, which takes seconds where workers are many and cores few.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

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
}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    """Returns a runner of jobs."""
    return Runs(tmp_path_factory.mktemp("fsdp"), server)


@pytest.mark.parametrize(
    "fields",
    [
        {
            **{"model": "gpt", "model_args": {"width": 32, "tied": True}, "pipelines": 2},
            **{"stages": 4, "stages_per_worker": 2, "schedule": "zbv"},
        },
        {
            **{"model": "resnet18", "model_args": {"width": 8}, "pipelines": 3, "microbatches": 2},
            **{"stages": 1, "activation_checkpoint": 3, "optimizer": "sgd", "optimizer_args": {"momentum": 0.9}},
        },
    ],
    ids=["gpt-zbv-x2", "resnet18-x3"],
)
def test_shards_change_no_bit(runs: Runs, fields: dict[str, Any]) -> None:
    job = Job(**SMALL | fields)
    ending, events = runs.run(job)
    assert ending.error is None, ending.error
    run_state = ending.view.run_state
    loop = plain_loop.PlainLoop(job)
    assert [row.texts() for row in run_state.rows] == [row for step in range(job.steps) for row in loop.step(step)]
    assert run_state.validations[job.steps - 1] == loop.validate()
    kept = [(event["step"], event["parts"]) for event in events if event["event"] == "kept"]
    assert kept == [(job.steps - 1, len(run_state.layers) * job.pipelines)]
    ops = {event["action"].lstrip("0123456789").split("@")[0] for event in events if event["event"] == "action"}
    assert {"UNSHARD", "RESHARD"} <= ops


def test_a_death_ends_the_run_and_says_what_is_lost(runs: Runs) -> None:
    job = Job(**SMALL, model="mlp", pipelines=2, stages=1)
    ending, _ = runs.run(job, [parse_kill("1:0:UNSHARD:before@1", job)])
    assert ending.exit_code == ExitCode.STATE_LOST
    assert "the state of stage 0 is lost" in str(ending.error)
    assert "last committed step 0" in str(ending.error)
