"""The links that an agent makes between workers: on one host a socket pair and two rings, with no name and no port.

Each worker gets its ends over its own link to the agent, so that no third process can have one. The agent keeps none:
the end of a worker is the end of its links. Between hosts it tells both a token, and one of them where the other
listens. A pair of workers has one link, however often both ask for it; it gets another one only for one that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable
from typing import Protocol

from engine.core.message_codec import decode, kind_of
from engine.core.process_messages import LinkMessage, LinkWantedMessage
from engine.runtime.ipc.link import Link

RING_BYTES = 64 << 20  # takes memory as far as it was written; an empty ring begins again at its first byte
COUNT_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a reader of a shorter file would end by SIGBUS
_TOKEN_BYTES = 16
_WANTED = f'{{"kind":"{kind_of(LinkWantedMessage)}"'.encode()

_Process = tuple[int, int]  # a worker and its process: another one may have its number later


class _Child(Protocol):
    pid: int


class Linked(Protocol):
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

    def __init__(self, living: Callable[[int], Linked | None]) -> None:
        self._living = living
        self._made: dict[frozenset[_Process], int] = {}
        self._number = time.time_ns()  # another agent may have made links before

    def link(self, one: Linked, wanted: LinkWantedMessage) -> bool:
        """Makes the link that a worker wants, unless both ends have got another one since the link `wanted.before`.

        Returns False if this agent does not know the other worker.
        """
        other = self._living(wanted.peer)
        if other is not None:
            self._link(one, other, wanted)
        return other is not None

    def hears(self, one: Linked, packet: bytes) -> bool:
        """Makes the link that a packet of a worker asks for; returns False for any other, or an unknown worker."""
        wanted = decode(packet) if packet.startswith(_WANTED) else None
        return isinstance(wanted, LinkWantedMessage) and self.link(one, wanted)

    def _link(self, one: Linked, other: Linked, wanted: LinkWantedMessage) -> None:
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

    def _near(self, one: Linked, other: Linked) -> None:
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
