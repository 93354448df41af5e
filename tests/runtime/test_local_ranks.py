"""Each worker has a GPU of its own: one that joins takes that of a worker that has ended, whatever its number is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.job.job import Job
from engine.files.accelerators import Accelerators
from engine.runtime.agent import start_up
from engine.runtime.agent.start_up import WorkerGroup
from engine.runtime.agent.worker_handles import WorkerHandle, free_rank

THREE = Accelerators(3, ("H100",), "570", "13.0")
NONE = cast(Any, None)


def handle(worker: int, host: str = "") -> WorkerHandle:
    return WorkerHandle(worker, (), NONE, NONE, Path("log"), host=host)


def crew(monkeypatch: pytest.MonkeyPatch, job: Job, host: str = "") -> WorkerGroup:
    """Returns three workers that run, without processes, on a host with as many GPUs."""
    server = SimpleNamespace(host=host, at=lambda worker: SimpleNamespace(host=""))
    launch = SimpleNamespace(job=job, server=server, record_fds=(), numbers=set[int](), ownership=NONE, logs=NONE)
    board = SimpleNamespace(fd=0, grow=lambda num_lines: None)
    monkeypatch.setattr(start_up, "start_worker", lambda server, worker, *rest: handle(worker))
    monkeypatch.setattr(start_up, "accelerators", lambda: THREE)
    found = WorkerGroup(cast(Any, launch), cast(Any, board), (), NONE, {})
    for worker in range(3):
        found.start(worker)
    return found


def test_a_new_worker_takes_the_rank_of_one_that_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    found = crew(monkeypatch, Job(stages=3))
    assert [each.local_rank for each in found.members.values()] == [0, 1, 2]
    found.members[1].exit_code = -9
    newcomer = found.start_waiting()
    assert (newcomer.worker, newcomer.local_rank) == (3, 1)
    assert found.start_waiting().local_rank == 3


def test_each_host_has_ranks_of_its_own() -> None:
    members = [handle(0, "a"), handle(1, "b")]
    assert [free_rank(members, host) for host in ("a", "b", "c")] == [1, 1, 0]


def test_a_worker_that_would_have_no_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    found = crew(monkeypatch, Job(stages=3, device="cuda"))
    assert found.lacks_gpu() == "3 GPUs for 4 workers"
    found.members[0].exit_code = 0
    assert found.lacks_gpu() == ""


@pytest.mark.parametrize(
    ("job", "host"), [(Job(stages=3), ""), (Job(device="cuda", share_gpu=True), ""), (Job(device="cuda"), "node-0")]
)
def test_a_worker_that_needs_no_gpu_of_this_host_joins(monkeypatch: pytest.MonkeyPatch, job: Job, host: str) -> None:
    assert crew(monkeypatch, job, host).lacks_gpu() == ""
