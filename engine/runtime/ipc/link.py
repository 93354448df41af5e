"""A link: whole JSON messages, with file descriptors if need be, over one end of a socket pair.

A packet socket keeps message borders, so there is no framing; nothing is ever pickled.
"""

from __future__ import annotations

import array
import json
import socket
from collections.abc import Sequence
from typing import Any

Message = dict[str, Any]

LOOPBACK = "127.0.0.1"  # where everything of a run listens, unless it is told otherwise

_MAX_BYTES = 160_000  # below the kernel's default socket buffer of 208 KiB
_MAX_FDS = 8


def packet(kind: str, **fields: Any) -> bytes:
    """Returns one message as it travels."""
    data = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode()
    assert len(data) <= _MAX_BYTES, f"a {kind} message of {len(data)} bytes does not fit a packet"
    return data


class Link:
    """One end of a pair; `receive` returns None once the other end is gone.

    An end that must never block (the agent's) raises BlockingIOError when there is nothing to receive, and takes an
    other end that no longer reads for gone.
    """

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

    def send(self, kind: str, fds: Sequence[int] = (), **fields: Any) -> bool:
        """Sends one message; returns False when the other end is gone, or does not read and sending must not block."""
        return self.send_packet(packet(kind, **fields), fds)

    def send_packet(self, data: bytes, fds: Sequence[int] = ()) -> bool:
        """Sends one message that `packet` has made, once for many links; returns what `send` does."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self.socket.sendmsg([data], rights)
        except (BlockingIOError, BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Message | None:
        """Waits for one message; descriptors that came with it are under ``fds``."""
        ancillary_size = socket.CMSG_SPACE(_MAX_FDS * array.array("i").itemsize)
        try:
            data, ancillary, _, _ = self.socket.recvmsg(_MAX_BYTES, ancillary_size)
        except ConnectionResetError:
            return None
        if not data:
            return None
        message: Message = json.loads(data)
        fds = array.array("i")
        for _, _, rights in ancillary:
            fds.frombytes(rights)
        message["fds"] = list(fds)
        return message

    def close(self) -> None:
        """Closes this end."""
        self.socket.close()
