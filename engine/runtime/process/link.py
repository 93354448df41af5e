"""A link: whole JSON messages, optionally with file descriptors, over one end of a socket pair.

A packet socket preserves message boundaries, so there is no framing; nothing is ever pickled.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from engine.codec.messages import decode, encode
from engine.core.errors import ensure
from engine.core.links import COUNT_BYTES, RING_BYTES
from engine.core.message_kinds import MAX_BYTES, Message, head_of
from engine.core.messages import LinkMessage, LinkWantedMessage

_MAX_FDS = 16


def packet(message: Message) -> bytes:
    """Returns an encoded message; raises InvariantError for one that does not fit."""
    data = encode(message)
    ensure(len(data) <= MAX_BYTES, f"a message {type(message).__name__} of {len(data)} bytes does not fit a packet")
    return data


class Link:
    """One end of a pair; `receive` returns None once the other end is gone.

    An end that must never block (the agent's) raises BlockingIOError if there is nothing to receive, and considers a
    peer that does not read gone.
    """

    takes_fds = True  # whether descriptors can travel

    def __init__(self, end: socket.socket, blocking: bool = True):
        self.socket = end
        self.socket.setblocking(blocking)

    @classmethod
    def pair(cls, blocking: bool = True) -> tuple[Link, Link]:
        """Returns the two ends of a new link; `blocking` is for the first."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(near, blocking), cls(far)

    @classmethod
    def from_fd(cls, fd: int) -> Link:
        """Returns the end with the descriptor `fd`, which the link then owns."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Returns the descriptor, so that selectors take a link."""
        return self.socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Sends one message; returns False if the other end is gone, or does not read and sending must not block."""
        return self.send_packet(packet(message), fds)

    def send_packet(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends a message that `packet` has encoded, once for many links; returns False in the same cases as `send`."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([data], rights)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Message | None:
        """Waits for one message without descriptors; raises InvariantError if it is malformed."""
        return self.receive_with_fds()[0]

    def receive_with_fds(self) -> tuple[Message | None, list[int]]:
        """Waits for one message; returns it with its descriptors, which the caller then owns."""
        ancillary_size = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        try:
            data, ancillary, flags, _ = self.socket.recvmsg(MAX_BYTES, ancillary_size, socket.MSG_CMSG_CLOEXEC)
        except ConnectionResetError:
            return None, []
        ensure(not flags & socket.MSG_CTRUNC, f"a message has at most {_MAX_FDS} descriptors; others were dropped")
        fds = array.array("i")
        for _, _, rights in ancillary:
            fds.frombytes(rights)
        return decode(data) if data else None, list(fds)

    def receive_packet(self) -> bytes:
        """Waits for one message with which no descriptor comes, as it travels; empty once the other end is gone."""
        try:
            return self.socket.recv(MAX_BYTES)
        except ConnectionResetError:
            return b""

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()


# Segments of shared memory are files in a folder of the host; they do not record their creator.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is made there
_PROC = Path("/proc")
_OF_NCCL = "nccl-"


def shared_memory() -> set[str]:
    """Returns the names of this user's segments of shared memory."""
    try:
        return {file.name for file in SHARED_MEMORY.iterdir() if file.stat().st_uid == os.geteuid()}
    except OSError:
        return set()


def held(names: set[str]) -> set[str]:
    """Returns those names in shared memory that a process has open or mapped."""
    in_use: set[str] = set()
    for entry in _PROC.iterdir() if names else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                paths = [(entry / "maps").read_text(), *_open_files(entry)]
                in_use |= {name for name in names if any(f"{SHARED_MEMORY}/{name}" in path for path in paths)}
    return in_use


def _open_files(process: Path) -> Iterator[str]:
    for file in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
            yield os.readlink(file)


@contextlib.contextmanager
def swept_of_nccl() -> Iterator[None]:
    """Afterwards removes NCCL's new segments that no process uses.

    If a worker is killed while two workers of a host connect their GPUs, one is left.
    """
    before = shared_memory()
    try:
        yield
    finally:
        new = {name for name in shared_memory() - before if name.startswith(_OF_NCCL)}
        for name in new - held(new):
            (SHARED_MEMORY / name).unlink(missing_ok=True)


# The links that an agent creates between workers: on one host a socket pair and two rings, without names or ports.
#
# Each worker gets its ends over its own link to the agent, so no third process can have one. The agent keeps none, so a
# worker's links end with it. Between hosts the agent sends both workers a token, and one of them the other's address. A
# pair of workers has one link, however often both request it, and gets another only after that one has closed.

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # else SIGBUS could hit a reader of a truncated file
_TOKEN_BYTES = 16
_REQUEST = head_of(LinkWantedMessage)

_Process = tuple[int, int]  # a worker and its pid: its number may be reused


class _Child(Protocol):
    pid: int


class WorkerLink(Protocol):
    """The agent's end of the link to a worker, of this host or another one; as `Link`."""

    takes_fds: bool  # whether descriptors can travel

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool: ...  # noqa: D102

    def send_packet(self, data: bytes, fds: Sequence[int] = ()) -> bool: ...  # noqa: D102

    def close(self) -> None: ...  # noqa: D102


class LinkedWorker(Protocol):
    """A worker as its agent sees it."""

    @property
    def worker(self) -> int:
        """Its number."""

    @property
    def child(self) -> _Child:
        """Its process."""

    @property
    def link(self) -> WorkerLink:
        """Its link to the agent."""


class LinkPairs:
    """The links that one agent has created; `living` returns a worker of its own that has not ended."""

    def __init__(self, living: Callable[[int], LinkedWorker | None]) -> None:
        self._living = living
        self._numbers: dict[frozenset[_Process], int] = {}
        self._number = time.time_ns()  # an earlier agent may have created links

    def link(self, one: LinkedWorker, request: LinkWantedMessage) -> bool:
        """Creates the link that a worker requests, unless both ends have got another since link `request.before`.

        Returns False if this agent does not know the other worker.
        """
        other = self._living(request.peer)
        if other is not None:
            self._link(one, other, request)
        return other is not None

    def hears(self, one: LinkedWorker, packet: bytes) -> bool:
        """Creates the link that a packet requests; returns False for any other packet, or an unknown worker."""
        request = decode(packet) if packet.startswith(_REQUEST) else None
        return isinstance(request, LinkWantedMessage) and self.link(one, request)

    def _link(self, one: LinkedWorker, other: LinkedWorker, request: LinkWantedMessage) -> None:
        pair = frozenset(((one.worker, one.child.pid), (other.worker, other.child.pid)))
        if len(pair) == 1 or self._numbers.get(pair, request.before) != request.before:
            return
        self._number += 1
        self._numbers[pair] = self._number
        if one.link.takes_fds and other.link.takes_fds:  # both are processes of this host
            self._near(one, other)
            return
        token = secrets.token_hex(_TOKEN_BYTES)
        one.link.send(LinkMessage(other.worker, self._number, token))
        other.link.send(LinkMessage(one.worker, self._number, token, request.address, request.port))

    def _near(self, one: LinkedWorker, other: LinkedWorker) -> None:
        with contextlib.ExitStack() as stack:
            near, far = socket.socketpair()
            stack.callback(near.close)
            stack.callback(far.close)
            rings: tuple[int, ...] = ()
            with contextlib.suppress(OSError):  # this user's files may not be that large: everything uses the socket
                rings = new_ring(stack), new_ring(stack)
            one.link.send(LinkMessage(other.worker, self._number), (near.fileno(), *rings))
            other.link.send(LinkMessage(one.worker, self._number), (far.fileno(), *reversed(rings)))


def new_ring(stack: contextlib.ExitStack) -> int:
    """Returns the descriptor of memory shared by the two workers of a link."""
    fd = os.memfd_create("bamboo-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    os.ftruncate(fd, RING_BYTES + COUNT_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
