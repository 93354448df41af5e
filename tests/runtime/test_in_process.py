"""A job in one process is the job: the same bits, with deaths too; and nothing of it is left in the process."""

from __future__ import annotations

import gc
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor, nn

from engine.core.checks.trajectory import trajectory_hash
from engine.core.errors import ExitCode
from engine.core.job.job import Job
from engine.runtime.agent.session import run_session
from tests.kills import parse_kills
from tests.runtime.thread_runs import run_in_threads


@pytest.mark.e2e
def test_the_trajectory_of_the_demo_is_that_of_processes(tmp_path: Path) -> None:
    job = Job(steps=6)
    ending = run_in_threads(job, parse_kills(["2:1:B:3", "4:0"], job))
    assert (ending.outcome, ending.error) == ("finished", None)
    processes = run_session(job, tmp_path / "events.jsonl", tmp_path)  # other bits on another kind of processor
    assert trajectory_hash(ending.view.run_state.rows) == trajectory_hash(processes.view.run_state.rows)
    assert [worker.state for worker in ending.view.workers] == ["dead", "dead", "left", "left"]


def test_shards_have_the_bits_of_whole_stages() -> None:
    job = Job(model="mlp", stages=2, pipelines=3, redundancy="none", steps=2)
    endings = [run_in_threads(each) for each in (job, replace(job, fsdp=1))]
    assert [each.error for each in endings] == [None, None]
    whole, shards = (trajectory_hash(each.view.run_state.rows) for each in endings)
    assert whole == shards


def test_nothing_is_left_in_the_process() -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def run() -> None:
        job = Job(model="mlp", stages=2, steps=2)
        assert run_in_threads(job, parse_kills(["1:1"], job)).outcome == "finished"

    run()  # some of its modules keep a descriptor
    before, until_s = held(), time.monotonic() + 10
    run()
    while held() > before and time.monotonic() < until_s:  # a thread may be about to end
        time.sleep(0.01)
    assert held() <= before


def test_a_job_that_cannot_start_ends() -> None:
    job = Job(model="tests.runtime.test_in_process:broken", data="synthetic", stages=3, steps=1)
    ending = run_in_threads(job)
    assert ending.exit_code == ExitCode.USAGE
    assert "no such layer" in str(ending.error)


class Broken(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no such layer")


def broken() -> list[nn.Module]:
    """Makes a model whose last stage cannot be probed."""
    return [nn.Linear(32, 32), nn.Linear(32, 32), Broken(32, 1)]
