"""Jobs over NCCL, on doubles, whose workers come, leave and hand slots over: the bits of the host."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine.core.checks.trajectory import trajectory_hash
from engine.core.history.run_records import EpochRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.runtime.agent import session
from engine.runtime.agent.agent import Agent
from engine.runtime.process.thread_server import ThreadServer
from engine.runtime.worker import thread_worker
from engine.runtime.worker.executor import Executor
from tests.doubles.fake_gpu import fake_gpu
from tests.doubles.fake_nccl import FakeNccl, NcclBesideLinks
from tests.kills import parse_kills
from tests.runtime.small_jobs import NORMED, small_job
from tests.runtime.test_hand_over import Hands
from tests.runtime.test_moves import wanting
from tests.runtime.test_nccl_runs import ON_GPU
from tests.runtime.thread_runs import run_in_threads, with_store_double

SMALL: dict[str, Any] = {
    **{"model": "mlp", "model_args": {"depth": 3, "width": 8}, "stages": 2, "blocks": 2, "microbatches": 2},
    **{"steps": 6, "seed": 3, "check_pure": False, "validate_every": 0, "checkpoint_every": "0"},
}
GROWING: dict[str, Any] = SMALL | {"steps": 30, "elastic": True}


class Doubles:
    """NCCL, as a double, in place of what each worker of a run has; on the host, or on a GPU that is a double too."""

    def __init__(self, on_gpu: bool, patch: pytest.MonkeyPatch):
        self.nccl, self._patch, self._on = FakeNccl(), patch, ON_GPU if on_gpu else {"backend": "nccl"}
        patch.setattr(thread_worker, "ThreadBackend", partial(NcclBesideLinks, self.nccl))
        patch.setattr(session, "refuse_what_this_host_lacks", lambda job: None)

    def run(self, job: Job, folder: Path, *kills: str) -> tuple[str, list[EpochRecord]]:
        """Returns the bits of a job that is run over NCCL, and its epochs."""
        folder.mkdir(exist_ok=True)
        events, job = folder / "events.jsonl", replace(job, **self._on)
        with ThreadServer() as server, with_store_double():
            ending = session.run_session(job, events, folder, server=server, faults=parse_kills(kills, job))
        assert (ending.outcome, ending.error) == ("finished", None)
        assert (self.nccl.wrongs, self.nccl.ended) == ([], []) and self.nccl.num_sent > 20
        return trajectory_hash(ending.view.run_state.rows), list(read_history(events).of(EpochRecord))

    def on_host(self, job: Job) -> str:
        """Returns the bits of a job without doubles."""
        self._patch.undo()
        return trajectory_hash(run_in_threads(job).view.run_state.rows)


@pytest.fixture(params=["host", pytest.param("gpu", marks=pytest.mark.soak)])
def doubles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Doubles]:
    with fake_gpu() if request.param == "gpu" else nullcontext():
        yield Doubles(request.param == "gpu", monkeypatch)


def test_a_hand_over_inside_a_step(doubles: Doubles, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen = Hands("1B0", monkeypatch)
    job = small_job(**NORMED, steps=3)
    bits, _ = doubles.run(job, tmp_path)
    assert seen.handed and seen.protocol is None
    assert len(seen.backwards) == len(set(seen.backwards)), "no backward is run again"
    assert doubles.nccl.left_behind == set()
    assert bits == doubles.on_host(job)


def test_blocks_move_at_a_boundary_in_the_group_that_is_there(doubles: Doubles, tmp_path: Path) -> None:
    with wanting({1: (0, 0, 0, 1)}):
        bits, epochs = doubles.run(Job(**SMALL), tmp_path)
    assert (epochs[-1].planned, epochs[-1].owners) == (True, (0, 0, 0, 1))
    nccl = doubles.nccl
    assert (nccl.num_aborted, nccl.num_aside, nccl.left_behind) == (2, 0, set()), "one communicator serves all epochs"
    assert bits == doubles.on_host(Job(**SMALL))


def test_a_waiting_worker_takes_the_place_of_a_dead_one(doubles: Doubles, tmp_path: Path) -> None:
    bits, epochs = doubles.run(Job(**SMALL, standby=1), tmp_path, "2:2")
    assert epochs[-1].members == (0, 2)
    assert doubles.nccl.left_behind == {1}, "the communicator of the worker that was killed"
    assert bits == doubles.on_host(Job(**SMALL))


def test_all_workers_begin_again_in_groups_of_their_own(doubles: Doubles, tmp_path: Path) -> None:
    """A worker that dies before the first commit has all of them started again, with the same numbers."""
    bits, epochs = doubles.run(Job(**SMALL, redundancy="none"), tmp_path, "0:2:B:0")
    assert [each.members for each in epochs] == [(0, 1)] * 2
    assert 1 in doubles.nccl.left_behind
    assert bits == doubles.on_host(Job(**SMALL, redundancy="none"))


@contextmanager
def a_joiner(folder: Path) -> Iterator[None]:
    """Asks for one more worker when the job begins; a step takes long enough for it to come."""
    decide, run_actions, has_asked = Agent.decide, Executor.run_actions, list[bool]()

    def acting(self: Agent, given: Any) -> Any:
        if not has_asked:
            has_asked.append(True)
            (folder / "join-1.json").touch(mode=0o600)
            (folder / "join-1.json").write_text(json.dumps({"ask": "join", "standby": False}))
        return decide(self, given)

    def slow(self: Executor) -> None:
        time.sleep(0.04)
        run_actions(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Agent, "decide", acting)
        patch.setattr(Executor, "run_actions", slow)
        yield


def test_a_communicator_forms_aside_and_is_entered_with_the_joiner(doubles: Doubles, tmp_path: Path) -> None:
    with a_joiner(tmp_path):
        bits, epochs = doubles.run(Job(**GROWING), tmp_path / "run")
    assert next(each.members for each in epochs[1:]) == (0, 1, 2)
    assert all(each.planned for each in epochs[1:]), "no verdict"
    assert doubles.nccl.num_aside == 2, "of the two members; the joiner has no other one"
    assert doubles.nccl.left_behind == set()
    assert bits == doubles.on_host(Job(**GROWING))
