"""The agent removes the parts that no manifest will name: a disk that is full would else stay full."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.core.checkpoint_rules import KeptMessage, UnkeptMessage
from engine.core.checks.trajectory import TrajectoryRow
from engine.core.history.run_records import KeptRecord, UnkeptRecord
from engine.core.job.job import Job
from engine.core.monitors import NO_MONITORS
from engine.files.checkpoint_folder import checkpoints_at
from engine.runtime.agent.checkpoints import Checkpoints
from engine.runtime.agent.keeper import Keeper, start_thread
from tests.files.made_checkpoints import bytes_of, sha256, state_hash, weights_of

STATE = state_hash(w=weights_of(1, 0))


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with Keeper(start_thread, Job(checkpoint_every="1"), str(tmp_path)) as keeper:
        yield keeper


def state_of(losses: list[float], note: Callable[[str], Any]) -> SimpleNamespace:
    of_run = {"best": lambda: None, "monitors": NO_MONITORS}
    return SimpleNamespace(note=note, layers=["first"], losses=losses, committed=len(losses) - 1, **of_run)


def test_parts_of_a_checkpoint_that_is_given_up_are_removed(keeper: Keeper) -> None:
    notes: list[str] = []
    records: list[Any] = []
    state = state_of([], notes.append)
    recorder = SimpleNamespace(write=records.append)
    agent = Checkpoints(keeper, cast(Any, state), cast(Any, recorder))
    folder = checkpoints_at(agent.place)

    def write(step: int) -> None:
        agent.kept(KeptMessage(step, folder.write_part(step, 0, [bytes_of(1, 0)]), 0, 0, 0))

    for step in range(2):
        agent.await_parts(step, 1)
        if step == 0:
            agent.unkept(UnkeptMessage(step, "the disk is full"))
            write(step)  # too late
        else:
            write(step)
            write(step)  # twice: the first counts
            agent.close_step(step, 0.5, [TrajectoryRow(step, 0, STATE, sha256(""), 0.5)])
    agent.close()
    assert [type(each) for each in records] == [UnkeptRecord, KeptRecord]
    assert notes == ["step 0 is not kept as a checkpoint: the disk is full"]
    assert folder.orphans() == ()
    assert [name.step for name in folder.names()] == [1]
    assert len(folder.verify(folder.names()[0]).parts) == 1


def test_the_next_host_removes_no_part_that_the_one_before_has_published(tmp_path: Path, keeper: Keeper) -> None:
    """Nobody has heard of it; the run then ends before the hashes of that step are complete."""
    silent = cast(Any, SimpleNamespace(write=lambda record: None))

    def coordinates(losses: list[float]) -> Checkpoints:
        state = state_of(losses, str)
        agent = Checkpoints(keeper, cast(Any, state), silent)
        agent.await_parts(1, 1)
        return agent

    first = coordinates([])
    folder = checkpoints_at(first.place, run=tmp_path.name)
    parts = [folder.write_part(1, 0, [bytes_of(1, 0)]), folder.write_part(1, 0, [bytes_of(1, 0)])]
    first.kept(KeptMessage(1, parts[0], 0, 0, 0))
    first.close_step(1, 0.5, [TrajectoryRow(1, 0, STATE, sha256(""), 0.5)])
    first.close()
    parts[1] = folder.write_part(1, 0, [bytes_of(1, 0)])
    for losses in ([0.5], [0.5, 0.5]):
        following = coordinates(losses)
        for part in parts:
            following.kept(KeptMessage(1, part, 0, 0, 0))
        following.close()
        (name,) = folder.names()
        assert folder.verify(name).parts == (parts[0],)
        assert folder.orphans() == ()


def test_code_that_changes_while_workers_run_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text("width = 1")
    state = cast(Any, SimpleNamespace(losses=[], committed=-1))
    with Keeper(start_thread, Job(model="net:make"), "run") as keeper:
        agent = Checkpoints(keeper, state, state)
        assert agent.changed_code() == []
        (tmp_path / "net.py").write_text("width = 2")
        assert agent.changed_code() == ["net.py"]
        agent.close()
