"""Real kills at copies of residuals to the host and back: the bits are those of a job in one stage without copies."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.job.job import Job
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, differences
from tests.kills import parse_kills

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

GPT: dict[str, Any] = {"model": "gpt", "model_args": {"width": 16, "heads": 2, "tied": True, "depth": 4}}
RESNET: dict[str, Any] = {"model": "resnet18", "model_args": {"width": 8}, "redundancy": "eager"}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("kills"), server)


@pytest.mark.parametrize(("kill", "victim"), [("1:0:OFFLOAD:2:during", 0), ("2:1:RELOAD:3:after", 1)])
@pytest.mark.parametrize("model", [GPT, RESNET], ids=["gpt", "resnet18"])
def test_the_death_of_a_worker_with_residuals_on_its_host_changes_no_bit(
    model: dict[str, Any], kill: str, victim: int, runs: Runs
) -> None:
    job = Job(
        **{"stages": 5, "microbatches": 8, "microbatch_size": 2, "steps": 5, "validate_every": 0} | model,
        check_pure=False,
        offload="host",
    )
    twin = runs.twin(job)
    ending, events = runs.run(job, parse_kills([kill], job))
    assert [*differences(ending, twin)] == []
    assert [event["of"] for event in events if event["event"] == "fault"] == [victim]
