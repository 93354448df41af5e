"""Fixtures of the tests with real processes: a session in this process, and a launcher as its own process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.core.job.job import Job
from engine.core.ownership import Ownership
from engine.runtime.agent import session
from engine.runtime.agent.coordinator import Node, join_store
from engine.runtime.agent.run_state import Ending
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_settings import EtcdSettings
from tests.e2e.launcher import ROOT, Launcher
from tests.e2e.over_nccl import OverNccl, served

Train = Callable[..., Ending]
Launch = Callable[..., Launcher]


@pytest.fixture(name="server", scope="session")
def _server() -> Iterator[ForkServer]:
    """One fork server for all sessions in this process; it imports torch once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT))
        server = ForkServer()
    with server:
        yield server


@pytest.fixture(name="one_etcd", scope="session")
def _one_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdSettings]:
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as etcd:
        yield etcd.settings()


@pytest.fixture
def shared_etcd(one_etcd: EtcdSettings) -> Iterator[None]:
    """Sessions in this process share one etcd: to start one takes a quarter of a small run."""

    def join(stack: ExitStack, own: EtcdSettings | None, *rest: Any) -> Node:
        return join_store(stack, own or one_etcd, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session, "join_store", join)
        yield


@pytest.fixture(name="nccl", scope="module")
def _nccl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OverNccl]:
    """Runs over a double of NCCL, with a fork server of their own."""
    with served(tmp_path_factory.mktemp("nccl")) as found:
        yield found


@pytest.fixture(name="train")
def _train(tmp_path_factory: pytest.TempPathFactory, server: ForkServer) -> Train:
    """Returns a function that runs a job in a session of this process, and fails the test if the job fails."""

    def train(job: Job, ownership: Ownership | None = None, ranks: tuple[int, ...] | None = None) -> Ending:
        folder: Path = tmp_path_factory.mktemp("session")
        ending = run_session(job, folder / "events.jsonl", folder, ownership=ownership, ranks=ranks, server=server)
        assert ending.error is None, ending.error
        return ending

    return train


@pytest.fixture(name="launch")
def _launch(tmp_path: Path) -> Iterator[Launch]:
    """Returns a function that starts `bamboo` with arguments; remaining processes are killed after the test."""
    launched: list[Launcher] = []

    def launch(*arguments: str, **environment: str) -> Launcher:
        launched.append(Launcher(tmp_path / str(len(launched)), arguments, environment))
        return launched[-1]

    yield launch
    for each in launched:
        each.kill_all()
