"""A second coordinator waits: training goes on with the same bits when the first is killed.

All moments: ``python -m tests.e2e.coordinator_kills``.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.runtime.agent import standby
from engine.runtime.process.fork_client import ForkServer
from tests.e2e.coordinator_kills import MOMENTS, kill_at
from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]

CHOSEN = (
    "all workers are to begin again",
    "a border is not told",
    "the first epoch is not told",
    "a later commit is not told",
    "the verdict is not told",
    "the plan is not told",
    "the hand-over is not told",
    "the end is not told",
)


@pytest.mark.parametrize("name", CHOSEN)
def test_training_goes_on_when_the_coordinator_is_killed(name: str, tmp_path: Path, server: ForkServer) -> None:
    assert len(MOMENTS) >= 20
    assert list(kill_at(name, tmp_path, server)) == []


def test_a_coordinator_that_gives_no_answer_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, server: ForkServer
) -> None:
    """In a recovery, by SIGSTOP: it lives and is silent, so only the time tells, which is shortened here."""
    monkeypatch.setattr(standby, "_ANSWER_S", 1.0)
    assert list(kill_at("it stands still in a recovery", tmp_path, server)) == []


def test_the_command_starts_a_standby(tmp_path: Path) -> None:
    job = "--model mlp --stages 2 --microbatches 2 --steps 3".split()
    run = Launcher(tmp_path, ("run", *job, "--standby-coordinator"), {})
    assert run.wait().code == 0
    assert len(run.events("coordinator")) == 2
    assert run.events("coordinator_ended") == []
