"""The launcher gives a keeper up whose disk does not answer: it ends, names the process and the lost checkpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.checkpoint_rules import KeptMessage
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import StorageError
from engine.core.history.run_records import KeptRecord, UnkeptRecord
from engine.core.job.job import Job
from engine.files.checkpoint_folder import CheckpointFolder, checkpoints_at
from engine.runtime.agent import checkpoints
from engine.runtime.agent.checkpoints import Checkpoints
from engine.runtime.agent.keeper import Keeper, keeper_for, start_program, start_thread
from engine.runtime.agent.orders import StartAway
from engine.runtime.agent.run_state import RunState
from engine.runtime.process.fork_client import Child
from tests.files.made_checkpoints import bytes_of, sha256, state_hash, weights_of

LIMIT_S = 0.3  # a quarter of a tick of the launcher more or less is no matter here


class Standing:
    """A keeper that waits for a disk for ever, and that no signal ends."""

    name, pid = "bamboo-keeper", 77
    is_ended = False

    def __init__(self) -> None:
        self.signals: list[int] = []
        self.fds: list[int] = []

    def start(self, fd: int) -> Child:
        self.fds.append(os.dup(fd))
        return cast(Child, self)

    def signal(self, number: int) -> None:
        self.signals.append(number)

    def wait(self, timeout_s: float = 0.0) -> int | None:
        return -9 if self.is_ended else None

    def close(self, patience_s: float = 0.0) -> None:
        """Leaves it behind."""


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Standing]:
    monkeypatch.setattr(checkpoints, "_END_S", LIMIT_S)
    standing = Standing()
    yield standing
    for fd in standing.fds:
        os.close(fd)


class Run:
    """The checkpoints of a run of one layer, and all that is told of them."""

    def __init__(self, folder: Path, start: StartAway):
        self.records: list[Any] = []
        self.state = RunState(Job(checkpoint_every="1"))
        self.keeper = Keeper(start, Job(checkpoint_every="1"), str(folder))
        recorder = cast(Any, SimpleNamespace(write=self.records.append))
        self.checkpoints = Checkpoints(self.keeper, self.state, recorder)
        self.folder: CheckpointFolder = checkpoints_at(self.checkpoints.place, run=folder.name)

    def keep(self, step: int) -> None:
        self.write(step)
        self.agree(step)

    def write(self, step: int) -> None:
        self.state.layers = ("first",)
        self.checkpoints.await_parts(step, 1)
        self.checkpoints.kept(KeptMessage(step, self.folder.write_part(step, 0, [bytes_of(step, 0)]), 0, 0, 0))

    def agree(self, step: int) -> None:
        self.checkpoints.close_step(
            step, 0.5, [TrajectoryRow(step, 0, state_hash(w=weights_of(step, 0)), sha256(""), 0.5)]
        )


def test_a_keeper_that_stands_holds_no_launcher(tmp_path: Path, standing: Standing) -> None:
    run = Run(tmp_path, standing.start)
    with run.keeper:
        run.keep(0)
        run.checkpoints.record()  # as in every tick
        run.checkpoints.close()
    assert [type(each) for each in run.records] == [UnkeptRecord]
    assert run.records[0].why == f"{str(tmp_path / 'checkpoints')!r} has not answered for 0.3 s"
    assert standing.signals == [9]
    assert run.state.notes[0].startswith("bamboo-keeper (pid 77), which writes the manifests, survived SIGKILL")
    assert run.state.missing()[-1] == "the last checkpoint"


def test_a_restart_looks_for_a_checkpoint_no_longer_than_a_limit(
    tmp_path: Path, standing: Standing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "_READ_S", LIMIT_S)
    with Keeper(standing.start, Job(), "") as keeper, pytest.raises(StorageError, match=r"has not answered for 0\.3 s"):
        Checkpoints(keeper, RunState(Job()), cast(Any, None)).newest_good(str(tmp_path), "run", None, None)


def test_another_keeper_goes_on_for_one_that_was_killed(tmp_path: Path, standing: Standing) -> None:
    """It claims the place anew, beside the claim that is left, and knows the user's code as the workers read it."""
    run = Run(tmp_path, lambda fd: start_thread(fd) if standing.is_ended else standing.start(fd))
    with run.keeper:
        standing.is_ended = True
        os.close(standing.fds.pop())
        run.keep(0)
        run.keep(1)
        run.checkpoints.close()
    assert [type(each) for each in run.records if each.step == 1] == [KeptRecord]
    assert run.keeper.number == 2
    assert run.folder.verify(run.folder.names()[-1]).step == 1


def test_a_keeper_can_be_a_program_of_its_own_as_beside_several_hosts(tmp_path: Path) -> None:
    assert keeper_for(cast(Any, SimpleNamespace(host="h1", pid=1)), Job(), "", "")._start is start_program
    run = Run(tmp_path, start_program)
    with run.keeper:
        run.keep(0)
        run.checkpoints.close()
    assert [type(each) for each in run.records] == [KeptRecord]


def test_a_claim_that_a_killed_keeper_has_left_keeps_nobody_out(tmp_path: Path) -> None:
    job = Job(checkpoint_every="1", checkpoints=str(tmp_path / "shared"))
    for _ in range(2):  # the first leaves its claim: it is gone without a word
        with Keeper(start_thread, job, str(tmp_path / "run")) as keeper:
            keeper.begin()
            keeper.ask("begin", None, None)
            held = os.listdir(tmp_path / "shared")
        keeper.begin()
        keeper.ask("begin", None, None)
        assert held
        keeper.close()
    until_s = time.monotonic() + 10
    while os.listdir(tmp_path / "shared"):
        assert time.monotonic() < until_s, "a keeper that is let go releases its claim"
        time.sleep(0.01)
