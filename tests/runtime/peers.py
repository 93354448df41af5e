"""Peers: functions of test modules, each called in a process of its own that a fork server has forked.

The server is the engine's, run by this module with one more role. A peer gets descriptors and plain values, and
answers with a plain value. One that is a worker has a control, whose agent makes the links between the workers of a
group of peers, and does nothing else; peers tell each other anything else in one file.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed import FileStore, PrefixStore

from engine.core.messages import LinkWantedMessage
from engine.runtime.process import forkserver
from engine.runtime.process.control import Control
from engine.runtime.process.fork_client import Child, ForkServer
from engine.runtime.process.link import Link, LinkPairs
from engine.runtime.transport.direct_transport import DirectBackend, DirectTransport, LinkCuts
from engine.runtime.transport.links import Links
from engine.runtime.transport.transport import AsideKey, AsidePurpose, ProgramKey, ProgramPurpose
from tests.runtime.peer_messages import Call, Hello, Result

ROOT = Path(__file__).resolve().parent.parent.parent
THIS_MODULE = "tests.runtime.peers"


@dataclass(frozen=True)
class Peer:
    """A started peer."""

    child: Child
    link: Link
    log: Path
    agent_end: Link

    def result(self) -> Any:
        """Waits for the peer's answer; fails the test with the peer's output if it gives none."""
        message = self.link.receive()
        assert message is not None, f"{self.child.name} ended without an answer:\n{self.log.read_text()}"
        assert isinstance(message, Result)
        return message.value


class PeerAgent:
    """The agent of all peers that are workers: a thread that makes their links."""

    def __init__(self) -> None:
        self._workers: dict[str, dict[int, Any]] = {}  # by group and number
        self._pairs: dict[str, LinkPairs] = {}
        self._wanted: list[tuple[str, int, LinkWantedMessage]] = []
        self._lock = threading.Lock()

    def serve(self, end: Link, pid: int) -> None:
        """Serves a peer until it ends."""
        threading.Thread(target=self._serve, args=(end, pid), daemon=True).start()

    def _serve(self, end: Link, pid: int) -> None:
        group, worker = "", -1
        with contextlib.suppress(OSError):  # it was closed
            while (message := end.receive()) is not None:
                with self._lock:
                    if isinstance(message, Hello):
                        group, worker = message.group, message.worker
                        workers = self._workers.setdefault(group, {})
                        workers[worker] = SimpleNamespace(worker=worker, child=SimpleNamespace(pid=pid), link=end)
                        self._pairs.setdefault(group, LinkPairs(workers.get))
                    elif isinstance(message, LinkWantedMessage):
                        self._wanted.append((group, worker, message))
                    self._link()

    def _link(self) -> None:
        """Makes the links of workers that are all there."""
        for each in list(self._wanted):
            group, worker, wanted = each
            if self._pairs[group].link(self._workers[group][worker], wanted):
                self._wanted.remove(each)


class PeerServer:
    """Starts peers, and releases what it holds of them when it closes."""

    def __init__(self, server: ForkServer, logs: Path):
        self.server = server
        self.logs = logs
        self.peers: list[Peer] = []
        self._agent = PeerAgent()
        self._numbers = itertools.count()

    def start(self, function: Callable[..., Any], *arguments: Any, fds: Sequence[int] = ()) -> Peer:
        """Has a new process call ``function(*fds, *arguments)``; the function stands at the top of its module."""
        near, far = Link.pair()
        agent_end, worker_end = Link.pair()
        name = f"peer-{next(self._numbers)}"
        log = self.logs / f"{name}.log"
        log_fd = os.open(log, os.O_WRONLY | os.O_CREAT)
        child = self.server.fork("peer", name, log_fd, [far.fileno(), worker_end.fileno(), *fds])
        os.close(log_fd)
        far.close()
        worker_end.close()
        self._agent.serve(agent_end, child.pid)
        near.send(Call(function.__module__, function.__name__, arguments, str(self.logs / "keys")))
        self.peers.append(Peer(child, near, log, agent_end))
        return self.peers[-1]

    def let_go(self) -> None:
        """Ends every peer, and forgets it."""
        for peer in self.peers:
            peer.child.signal(signal.SIGKILL)
            peer.link.close()
            peer.agent_end.close()
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


class PeerWorker:
    """A peer that is a worker of a group of peers: its control, its links and its ends in one epoch after the other."""

    def __init__(self, group: str, worker: int):
        self.control = Control(_ends[0])
        self.control.send(Hello(group, worker))
        self.links = Links(self.control)
        self.cuts = LinkCuts(self.control)

    def enter(self, epoch: int, members: Sequence[int] = (0, 1)) -> DirectTransport:
        """Returns the end of this worker in the group of an epoch."""
        return DirectBackend(self.cuts, self.links).joining(epoch, members).join()


def plane_of(group: str, worker: int, members: Sequence[int] = (0, 1)) -> DirectTransport:
    """Returns the end of this peer, a worker, in the first group of a group of peers."""
    return PeerWorker(group, worker).enter(0, members)


def an_order(number: int) -> ProgramKey:
    """Returns a key in program order that stands for nothing else."""
    return ProgramKey(ProgramPurpose.ACTIVATION, 0, 0, number, number)


def an_aside(number: int) -> AsideKey:
    """Returns a key aside that stands for nothing else."""
    return AsideKey(AsidePurpose.STREAM, 0, 0, number, number)


_paths: list[str] = []  # the only one, in a peer
_ends: list[Link] = []  # to the agent; the only one


def be_peer(link_fd: int, worker_fd: int, *fds: int) -> int:
    """What a peer does with its life."""
    link = Link.from_fd(link_fd)
    call = link.receive()
    assert isinstance(call, Call)
    _paths.append(call.keys)
    _ends.append(Link.from_fd(worker_fd))
    function = getattr(importlib.import_module(call.module), call.function)
    link.send(Result(function(*fds, *call.arguments)))
    return 0


if __name__ == "__main__":
    forkserver.ROLES["peer"] = (THIS_MODULE, "be_peer")
    forkserver.main()
