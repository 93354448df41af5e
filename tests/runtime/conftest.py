"""What the tests of this folder share: peers, their store and one etcd, which take a second to start; a control."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from engine.core.errors import ExitCode
from engine.runtime.process.control import Control
from engine.runtime.process.link import Link
from engine.runtime.store.embedded_etcd import EmbeddedEtcd
from engine.runtime.store.etcd_settings import EtcdSettings
from tests.runtime.kv_backends import Backend, DoubleBackend, EtcdBackend
from tests.runtime.peers import PeerServer, peer_server


@pytest.fixture(name="started", scope="package")
def _started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PeerServer]:
    with peer_server(tmp_path_factory.mktemp("peers")) as server:
        yield server


@pytest.fixture
def peers(started: PeerServer) -> Iterator[PeerServer]:
    """Starts functions of test modules in processes of their own, which end with the test."""
    yield started
    started.let_go()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Lets torch compute with one thread, as workers do by default."""
    torch = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdSettings]:
    """Returns how to reach an etcd that all tests share; each has a root of its own there."""
    with EmbeddedEtcd(tmp_path_factory.mktemp("etcd")) as server:
        yield server.settings()


@pytest.fixture(params=["double", "etcd"])
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """A store that other tests use too."""
    backend = DoubleBackend() if request.param == "double" else EtcdBackend(request.getfixturevalue("etcd"))
    yield backend
    backend.close()


@pytest.fixture(params=["double", "etcd"])
def fragile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    """A store that the test may stop."""
    if request.param == "double":
        yield DoubleBackend()
        return
    with EmbeddedEtcd(tmp_path) as server:
        backend = EtcdBackend(server.settings(), server)
        yield backend
        backend.close()


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Control, Link]]:
    """A control and the agent's end; when that closes, the thread ends here instead of the process."""
    exit_codes: list[int] = []

    def leave(code: int) -> NoReturn:
        exit_codes.append(code)
        raise SystemExit

    monkeypatch.setattr(os, "_exit", leave)
    near, far = Link.pair()
    control = Control(near)
    *_, thread = (each for each in threading.enumerate() if each.name == "control")  # others are of other tests
    yield control, far
    far.close()
    thread.join(5.0)
    near.close()
    assert exit_codes == [ExitCode.INTERNAL], "a worker without an agent ends"
