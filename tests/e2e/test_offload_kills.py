"""Real kills at copies of residuals to the host and back: the bits are those of a job in one stage without copies."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.action import Op
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.kill_runs import Runs, differences
from tests.kills import parse_kills

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_etcd")]

GPT: dict[str, Any] = {"model": "gpt", "model_args": {"width": 16, "heads": 2, "tied": True, "depth": 4}}
BLOCKS = {"stages": 3, "blocks": 2, "elastic": True, "activation_checkpoint": 2}
KILLED: dict[str, dict[str, Any]] = {
    "gpipe": {"schedule": "gpipe", "log_every": 2},
    "zb1p": {"schedule": "zb1p", "redundancy": "eager"},
    "v-half": {"schedule": "v-half", "stages": 6, "stages_per_worker": 2},
    "blocks": BLOCKS,
    "two pipelines": {"schedule": "gpipe", "stages": 3, "pipelines": 2, "redundancy": "reroute"},
    "slices": {"schedule": "zb1p", "slices": 2},
}
_SAMPLE = (
    *(("blocks", Op.RELOAD, "before"), ("slices", Op.OFFLOAD, "after")),
    *(("zb1p", Op.RELOAD_W, "during"), ("slices", Op.OFFLOAD_W, "before")),
)
RESNET: dict[str, Any] = {"model": "resnet18", "model_args": {"width": 8}, "redundancy": "eager"}


@pytest.fixture(name="runs", scope="module")
def _runs(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Runs:
    return Runs(tmp_path_factory.mktemp("kills"), server)


@pytest.mark.parametrize(("kill", "victim"), [("1:0:OFFLOAD:2:during", 0), ("2:1:RELOAD:3:after", 1)])
@pytest.mark.parametrize("model", [GPT, pytest.param(RESNET, marks=pytest.mark.soak)], ids=["gpt", "resnet18"])
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


@pytest.mark.parametrize(
    ("name", "op", "when"),
    [
        pytest.param(name, op, when, marks=[pytest.mark.soak] * ((name, op, when) not in _SAMPLE))
        for name, fields in KILLED.items()
        for op in (Op.OFFLOAD, Op.RELOAD, Op.OFFLOAD_W, Op.RELOAD_W)
        for when in ("before", "during", "after")
        if op in (Op.OFFLOAD, Op.RELOAD) or fields.get("schedule") == "zb1p"
    ],
)
def test_a_death_at_a_copy_beside_other_options(name: str, op: Op, when: str, runs: Runs) -> None:
    fields = {
        "stages": 4,
        "microbatches": 6,
        "microbatch_size": 2,
        "steps": 5,
        "validate_every": 0,
        "check_pure": False,
    }
    job = Job(**fields | GPT | KILLED[name], offload="host", offload_time=0.1)
    program, ownership = initial_program(job)
    owned = {
        worker: [each for each in line if ownership.owner(each.pipeline, each.stage) == worker]
        for worker, line in program.items()
    }
    copies = [each for line in owned.values() for each in line if each.op is op]
    copy = copies[len(copies) * (1 + ("before", "during", "after").index(when)) // 4]
    kill = f"2:{copy.stage}:{op}:{copy.microbatch}:{when}@{copy.pipeline}"
    twin = runs.twin(job)
    ending, events = runs.run(job, parse_kills([kill], job))
    assert [*differences(ending, twin)] == []
    victims = [event["of"] for event in events if event["event"] == "fault"]
    assert victims == [ownership.owner(copy.pipeline, copy.stage)]
