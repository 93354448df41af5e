"""A link: whole JSON messages, with file descriptors if need be, over one end of a socket pair.

A packet socket keeps message borders, so there is no framing; nothing is ever pickled.
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

from engine.core.errors import ensure
from engine.core.message_codec import MAX_BYTES, Message, decode, encode, head_of
from engine.core.messages import LinkMessage, LinkWantedMessage

_MAX_FDS = 16


def packet(message: Message) -> bytes:
    """Returns one message as it travels; raises InvariantError for a message of bamboo's own that does not fit."""
    data = encode(message)
    ensure(len(data) <= MAX_BYTES, f"a message {type(message).__name__} of {len(data)} bytes does not fit a packet")
    return data


class Link:
    """One end of a pair; `receive` returns None once the other end is gone.

    An end that must never block (the agent's) raises BlockingIOError when there is nothing to receive, and takes an
    other end that no longer reads for gone.
    """

    takes_fds = True  # whether descriptors can travel

    def __init__(self, end: socket.socket, blocking: bool = True):
        self.socket = end
        self.socket.setblocking(blocking)

    @classmethod
    def pair(cls, blocking: bool = True) -> tuple[Link, Link]:
        """Returns the two ends of a new link; `blocking` is about the first."""
        near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        return cls(near, blocking), cls(far)

    @classmethod
    def from_fd(cls, fd: int) -> Link:
        """Returns the end that `fd` is, which the link then owns."""
        return cls(socket.socket(fileno=fd))

    def fileno(self) -> int:
        """Returns the descriptor, so that selectors take a link."""
        return self.socket.fileno()

    def send(self, message: Message, fds: Sequence[int] = ()) -> bool:
        """Sends one message; returns False when the other end is gone, or does not read and sending must not block."""
        return self.send_packet(packet(message), fds)

    def send_packet(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends one message that `packet` has made, once for many links; returns False in the same cases as `send`."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([data], rights)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Message | None:
        """Waits for one message, with which no descriptor comes; raises InvariantError for bytes that are none."""
        return self.receive_with_fds()[0]

    def receive_with_fds(self) -> tuple[Message | None, list[int]]:
        """Waits for one message; returns it with the descriptors that came with it, which the caller then owns."""
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

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()


# Pieces of shared memory of this user, which do not name their creator: files in a folder of the host.
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - nothing is made there
_PROC = Path("/proc")
_OF_NCCL = "nccl-"


def shared_memory() -> set[str]:
    """Returns the names of this user's pieces."""
    try:
        return {each.name for each in SHARED_MEMORY.iterdir() if each.stat().st_uid == os.geteuid()}
    except OSError:
        return set()


def held(names: set[str]) -> set[str]:
    """Returns those names in shared memory that a process has open or mapped."""
    names_held: set[str] = set()
    for entry in _PROC.iterdir() if names else ():
        with contextlib.suppress(OSError):
            if entry.name.isdigit():
                known = [(entry / "maps").read_text(), *_open_files(entry)]
                names_held |= {name for name in names if any(f"{SHARED_MEMORY}/{name}" in each for each in known)}
    return names_held


def _open_files(process: Path) -> Iterator[str]:
    for each in (process / "fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile, such as the descriptor of this listing
            yield os.readlink(each)


@contextlib.contextmanager
def swept_of_nccl() -> Iterator[None]:
    """Removes behind the block the pieces of NCCL that are new by then, and held by no process.

    A worker that is killed while two workers of a host connect their GPUs leaves one: the last of them would remove it.
    """
    before = shared_memory()
    try:
        yield
    finally:
        new = {name for name in shared_memory() - before if name.startswith(_OF_NCCL)}
        for name in new - held(new):
            (SHARED_MEMORY / name).unlink(missing_ok=True)


# The links that an agent makes between workers: on one host a socket pair and two rings, with no name and no port.
#
# Each worker gets its ends over its own link to the agent, so that no third process can have one. The agent keeps none:
# the end of a worker is the end of its links. Between hosts it tells both a token, and one of them where the other
# listens. A pair of workers has one link, however often both ask for it; it gets another one only for one that has
# ended.

RING_BYTES = 64 << 20  # takes memory as far as it was written; an empty ring begins again at its first byte
COUNT_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a reader of a shorter file would end by SIGBUS
_TOKEN_BYTES = 16
_WANTED = head_of(LinkWantedMessage)

_Process = tuple[int, int]  # a worker and its process: another one may have its number later


class _Child(Protocol):
    pid: int


class LinkedWorker(Protocol):
    """A worker, as its agent has it."""

    @property
    def worker(self) -> int:
        """Its number."""

    @property
    def child(self) -> _Child:
        """Its process."""

    @property
    def link(self) -> Link:
        """Its link to the agent."""


class LinkPairs:
    """The links that one agent has made; `living` returns a worker that it has, and that has not ended."""

    def __init__(self, living: Callable[[int], LinkedWorker | None]) -> None:
        self._living = living
        self._made: dict[frozenset[_Process], int] = {}
        self._number = time.time_ns()  # another agent may have made links before

    def link(self, one: LinkedWorker, request: LinkWantedMessage) -> bool:
        """Makes the link that a worker wants, unless both ends have got another one since the link `wanted.before`.

        Returns False if this agent does not know the other worker.
        """
        other = self._living(request.peer)
        if other is not None:
            self._link(one, other, request)
        return other is not None

    def hears(self, one: LinkedWorker, packet: bytes) -> bool:
        """Makes the link that a packet of a worker asks for; returns False for any other, or an unknown worker."""
        wanted = decode(packet) if packet.startswith(_WANTED) else None
        return isinstance(wanted, LinkWantedMessage) and self.link(one, wanted)

    def _link(self, one: LinkedWorker, other: LinkedWorker, wanted: LinkWantedMessage) -> None:
        pair = frozenset(((one.worker, one.child.pid), (other.worker, other.child.pid)))
        if len(pair) == 1 or self._made.get(pair, wanted.before) != wanted.before:
            return
        self._number += 1
        self._made[pair] = self._number
        if one.link.takes_fds and other.link.takes_fds:  # both are processes of this host
            self._near(one, other)
            return
        token = secrets.token_hex(_TOKEN_BYTES)
        one.link.send(LinkMessage(other.worker, self._number, token))
        other.link.send(LinkMessage(one.worker, self._number, token, wanted.address, wanted.port))

    def _near(self, one: LinkedWorker, other: LinkedWorker) -> None:
        with contextlib.ExitStack() as stack:
            near, far = socket.socketpair()
            stack.callback(near.close)
            stack.callback(far.close)
            rings: tuple[int, ...] = ()
            with contextlib.suppress(OSError):  # files of this user may not be so large: all goes over the socket
                rings = new_ring(stack), new_ring(stack)
            one.link.send(LinkMessage(other.worker, self._number), (near.fileno(), *rings))
            other.link.send(LinkMessage(one.worker, self._number), (far.fileno(), *reversed(rings)))


def new_ring(stack: contextlib.ExitStack) -> int:
    """Returns the descriptor of memory that the two workers of a link share."""
    fd = os.memfd_create("bamboo-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    os.ftruncate(fd, RING_BYTES + COUNT_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
