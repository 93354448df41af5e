"""Whole jobs over the transport of NCCL, on doubles of NCCL and of a GPU: their bits are those of every other job."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from engine.core.checks.trajectory import trajectory_hash
from engine.core.job.job import Job
from engine.core.ownership import Redundancy, directions_of
from engine.core.program.schedules import SCHEDULES
from engine.runtime.agent import session
from engine.runtime.agent.run_state import Ending
from engine.runtime.worker import thread_worker
from tests.doubles.fake_gpu import fake_gpu
from tests.doubles.fake_nccl import FakeNccl, NcclBesideLinks
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

MLP: dict[str, Any] = {"model": "mlp", "steps": 3, "microbatches": 4, "stages": 3, "seed": 3}
ON_GPU: dict[str, Any] = {"device": "cuda", "share_gpu": True, "backend": "nccl"}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """Puts the transport of NCCL in place of that of each worker in this process, on doubles."""
    nccl = FakeNccl()
    monkeypatch.setattr(thread_worker, "ThreadBackend", partial(NcclBesideLinks, nccl))
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    with fake_gpu():
        yield nccl


def run(job: Job, *kills: str) -> Ending:
    ending = run_in_threads(job, parse_kills(list(kills), job))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [worker.state for worker in ending.view.workers].count("dead") == len(kills)
    return ending


def same_bits(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], *kills: str) -> None:
    on_gpu = trajectory_hash(run(Job(**fields, **ON_GPU), *kills).view.run_state.rows)
    assert nccl.wrongs == [] and nccl.ended == []
    assert nccl.num_sent > 20 and nccl.num_aborted >= 2
    monkeypatch.undo()
    assert on_gpu == trajectory_hash(run(replace(Job(**fields), retain="device")).view.run_state.rows)


def test_a_job_with_a_kill_has_the_bits_of_the_host(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    same_bits(nccl, monkeypatch, {**MLP, "retain": "cpu"}, "1:1:B:1")


@pytest.mark.soak
@pytest.mark.parametrize(("pipelines", "redundancy"), [(1, "lazy"), (1, "eager"), (2, "reroute")])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_with_a_kill(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch, name: str, pipelines: int, redundancy: Redundancy
) -> None:
    v = max(1, SCHEDULES[name].stages_per_worker[0])
    pipelines = max(pipelines, directions_of(name))
    layout = {"schedule": name, "stages": 4, "stages_per_worker": v, "pipelines": pipelines, "redundancy": redundancy}
    same_bits(nccl, monkeypatch, {**MLP, **layout, "log_every": int(redundancy == "lazy")}, f"1:{4 // v - 1}:F:2")


@pytest.mark.soak
@pytest.mark.parametrize(
    ("fields", "kills"),
    [
        ({**MLP, "blocks": 2, "model_args": {"depth": 5, "width": 8}}, ["1:2:F:1"]),
        ({**MLP, "model": "gpt", "model_args": {"width": 8, "depth": 1, "heads": 1, "tied": True}}, ["1:1:B:1"]),
        ({**MLP, "steps": 5, "stages": 4, "validate_every": 2}, ["1:3:B:1", "3:1:F:0"]),
    ],
    ids=["blocks", "tied", "two kills"],
)
def test_blocks_ties_and_two_kills(
    nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any], kills: list[str]
) -> None:
    same_bits(nccl, monkeypatch, fields, *kills)
