"""Whole jobs over the transport of NCCL, on doubles of NCCL and of a GPU: their bits are those of every other job."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

from engine.core.checks.trajectory import trajectory_hash
from engine.core.config.job import Job
from engine.runtime.agent import session
from engine.runtime.agent.run_view import Ending
from engine.runtime.in_process import thread_server
from tests.doubles.fake_gpu import fake_gpu
from tests.doubles.fake_nccl import FakeNccl, NcclOverLoopback
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads

MLP: dict[str, Any] = {"model": "mlp", "steps": 3, "microbatches": 4, "stages": 3, "seed": 3}
ON_GPU: dict[str, Any] = {"device": "cuda", "share_gpu": True, "backend": "nccl"}


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeNccl]:
    """Puts the transport of NCCL in place of that of each worker in this process, on doubles."""
    nccl = FakeNccl()
    monkeypatch.setattr(thread_server, "LoopbackBackend", partial(NcclOverLoopback, nccl))
    monkeypatch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)
    with fake_gpu():
        yield nccl


def run(job: Job, *kills: str) -> Ending:
    ending = run_in_threads(job, parse_kills(list(kills), job))
    assert (ending.outcome, ending.error) == ("finished", None)
    assert [worker.state for worker in ending.view.workers].count("dead") == len(kills)
    return ending


def over_host(monkeypatch: pytest.MonkeyPatch, job: dict[str, Any], *kills: str) -> str:
    return trajectory_hash(run(Job(**job), *kills).view.run_state.rows)


def test_a_job_with_a_kill(nccl: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> None:
    on_gpu = trajectory_hash(run(Job(**MLP, **ON_GPU), "1:1:B:1").view.run_state.rows)
    assert nccl.wrongs == [] and nccl.ended == []
    assert nccl.num_sent > 60 and nccl.num_aborted >= 2
    monkeypatch.undo()
    assert on_gpu == trajectory_hash(run(Job(**MLP)).view.run_state.rows)
