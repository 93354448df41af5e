"""Peers: functions of test modules, each called in a process of its own that a fork server has forked.

The server is the engine's, run by this module with one more role. A peer gets descriptors and plain values, and
answers with a plain value. All peers of a server meet in one file, as no agent passes their keys on.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import FileStore, PrefixStore

from engine.runtime.ipc.control import Control
from engine.runtime.ipc.link import Link
from engine.runtime.process import forkserver
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.transport.gloo_backend import GlooBackend
from engine.runtime.transport.gloo_transport import GlooJoining, GlooTransport
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.transfer_key import AsideKey, AsidePurpose, ProgramKey, ProgramPurpose
from engine.runtime.transport.transport import Waiter
from tests.runtime.peer_messages import Call, Result

ROOT = Path(__file__).resolve().parent.parent.parent
THIS_MODULE = "tests.runtime.peers"


@dataclass(frozen=True)
class Peer:
    """A started peer."""

    child: Child
    link: Link
    log: Path

    def result(self) -> Any:
        """Waits for the peer's answer; fails the test with the peer's output if it gives none."""
        message = self.link.receive()
        assert message is not None, f"{self.child.name} ended without an answer:\n{self.log.read_text()}"
        assert isinstance(message, Result)
        return message.value


class PeerServer:
    """Starts peers, and releases what it holds of them when it closes."""

    def __init__(self, server: ForkServer, logs: Path):
        self.server = server
        self.logs = logs
        self.peers: list[Peer] = []
        self._numbers = itertools.count()

    def start(self, function: Callable[..., Any], *arguments: Any, fds: Sequence[int] = ()) -> Peer:
        """Has a new process call ``function(*fds, *arguments)``; the function stands at the top of its module."""
        near, far = Link.pair()
        name = f"peer-{next(self._numbers)}"
        log = self.logs / f"{name}.log"
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT)
        child = self.server.fork("peer", name, log_fd, [far.fileno(), *fds])
        os.close(log_fd)
        far.close()
        near.send(Call(function.__module__, function.__name__, arguments, str(self.logs / "keys")))
        self.peers.append(Peer(child, near, log))
        return self.peers[-1]

    def let_go(self) -> None:
        """Ends every peer, and forgets it."""
        for peer in self.peers:
            peer.child.signal(signal.SIGKILL)
            peer.link.close()
            peer.child.close()
        self.peers = []

    def close(self) -> None:
        """Ends every peer, and the server."""
        self.let_go()
        self.server.close()


@contextlib.contextmanager
def peer_server(logs: Path) -> Iterator[PeerServer]:
    """Runs a fork server that knows peers."""

    def popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        python, _, m, _, *arguments = command  # -P, which keeps this folder from the path: tests are no part of bamboo
        return original([python, m, THIS_MODULE, *arguments], **(options | {"cwd": ROOT}))

    original = subprocess.Popen
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", popen)
        server = ForkServer()
    with contextlib.closing(PeerServer(server, logs)) as peers:
        yield peers


def connect(group: str) -> Any:
    """Returns the keys of a group of peers, in a peer."""
    return PrefixStore(group, FileStore(_paths[0]))


def backend_of(prefix: str, waiter: Waiter, worker: int) -> GlooBackend:
    """Returns the backend of a peer that is a worker; the groups of a prefix are theirs alone."""
    return GlooBackend(LinkCuts(waiter), worker, lambda epoch, group: connect(f"{prefix}/{group}"))


def plane_of(prefix: str, worker: int, members: Sequence[int] = (0, 1), timeout_s: float = 10.0) -> GlooTransport:
    """Joins a group of peers that are workers, with a control of its own."""
    near, far = Link.pair()
    _far_ends.append(far)
    return GlooJoining(LinkCuts(Control(near)), connect(prefix), worker, members, timeout_s=timeout_s).join()


def an_order(number: int) -> ProgramKey:
    """Returns a key in program order that stands for nothing else."""
    return ProgramKey(ProgramPurpose.ACTIVATION, 0, 0, number, number)


def an_aside(number: int) -> AsideKey:
    """Returns a key aside that stands for nothing else."""
    return AsideKey(AsidePurpose.STREAM, 0, 0, number, number)


_paths: list[str] = []  # the only one, in a peer
_far_ends: list[Link] = []  # of controls: when one closes, the process ends


def be_peer(link_fd: int, *fds: int) -> int:
    """What a peer does with its life."""
    link = Link.from_fd(link_fd)
    call = link.receive()
    assert isinstance(call, Call)
    _paths.append(call.keys)
    function = getattr(importlib.import_module(call.module), call.function)
    link.send(Result(function(*fds, *call.arguments)))
    return 0


if __name__ == "__main__":
    forkserver.ROLES["peer"] = (THIS_MODULE, "be_peer")
    forkserver.main()
