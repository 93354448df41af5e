"""A link: whole JSON messages, with file descriptors if need be, over one end of a socket pair.

A packet socket keeps message borders, so there is no framing; nothing is ever pickled.
"""

from __future__ import annotations

import array
import socket
from collections.abc import Sequence

from engine.core.errors import ensure
from engine.core.message_codec import MAX_BYTES, Message, decode, encode

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
