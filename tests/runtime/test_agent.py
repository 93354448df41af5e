"""The agent, with real workers: what it makes of deaths at the worst moments."""

from __future__ import annotations

import select
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.core.config.job import Job
from engine.core.errors import ExitCode, WorkerFailedError
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import Child, ForkServer


def test_a_worker_that_dies_while_others_are_forked_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its pidfd and its link are ready before anyone watches them."""
    fork = ForkServer.fork

    def fork_and_kill_the_second(self: ForkServer, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        child = fork(self, role, name, log_fd, fds)
        if name == "bamboo-1":
            child.signal(signal.SIGKILL)
            assert select.select([child.pidfd], [], [], 5)[0]
        return child

    monkeypatch.setattr(ForkServer, "fork", fork_and_kill_the_second)
    ending = run_session(Job(model="mlp", stages=3), tmp_path / "events.jsonl", tmp_path)
    assert isinstance(ending.error, WorkerFailedError)
    pid = ending.view.workers[1].pid
    who = f"worker 1 (pid {pid}) wrote {tmp_path / 'worker-1.log'}"
    assert str(ending.error) == f"training did not recover: worker 1 was ended by SIGKILL; {who}"
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.NOT_RECOVERED)
    assert [each.state for each in ending.view.workers] == ["starting", "dead", "starting"]
