"""The agent, with real workers: what it makes of deaths at the worst moments."""

from __future__ import annotations

import re
import select
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine.core.config.job import Job
from engine.core.errors import ExitCode, InvariantError, WorkerFailedError
from engine.runtime.agent.session import run_session
from engine.runtime.agent.worker_handles import RendezvousStore
from engine.runtime.process.fork_client import Child, ForkServer
from tests.runtime.peers import PeerServer


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


def test_a_store_that_ends_before_training_ends_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The first group may be half formed, and nobody has anything to lose yet."""
    fork = ForkServer.fork

    def fork_and_kill_the_store(self: ForkServer, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        child = fork(self, role, name, log_fd, fds)
        if role == "store":
            child.signal(signal.SIGKILL)
        return child

    monkeypatch.setattr(ForkServer, "fork", fork_and_kill_the_store)
    ending = run_session(Job(model="mlp", stages=2), tmp_path / "events.jsonl", tmp_path)
    assert (ending.outcome, ending.exit_code) == ("failed", ExitCode.ENVIRONMENT)
    said = r"the rendezvous store \(pid \d+\) was ended before training began: start the run again; .*store.log and "
    assert re.match(said, str(ending.error))


def test_stores_that_never_serve_are_not_started_for_ever(
    monkeypatch: pytest.MonkeyPatch, peers: PeerServer, tmp_path: Path
) -> None:
    fork = ForkServer.fork

    def fork_something_else(self: ForkServer, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        return fork(self, "nobody", name, log_fd, fds)

    monkeypatch.setattr(ForkServer, "fork", fork_something_else)
    store = RendezvousStore(peers.server, tmp_path)
    ports = {store.port}
    for _ in range(2):
        assert select.select([store.child.pidfd], [], [], 5)[0]
        store.start_again()
        ports.add(store.port)
    assert len(ports) == 3
    assert select.select([store.child.pidfd], [], [], 5)[0]
    with pytest.raises(
        InvariantError, match=r"3 rendezvous stores ended before they served; the last one wrote .*store\.log"
    ):
        store.start_again()
    assert (tmp_path / "store.log").read_text().count("KeyError: 'nobody'") == 3
    store.close()
