"""The sockets that libraries open in this process: found by inode, named, closed to strangers, and shut down."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
from collections.abc import Collection, Iterator

LOOPBACK = "127.0.0.1"  # where everything of a run listens, unless it is told otherwise

_SO_ATTACH_FILTER = 26


def descriptors_by_inode() -> dict[int, int]:
    """Returns inode -> descriptor of this process's sockets; a descriptor may be reused, an inode is not."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            found[int(target[8:-1])] = int(name)
    return found


def shut_down(inodes: Collection[int]) -> None:
    """Shuts down the connected ones of these sockets, which ends every transfer and wait; they stay open."""
    for view in _views(inodes):
        # A listening socket is left out: gloo aborts the process if it is shut down.
        if not view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with contextlib.suppress(OSError):  # its peer has left first
                view.shutdown(socket.SHUT_RDWR)


def connections_of(inodes: Collection[int]) -> set[tuple[str, str]]:
    """Returns the addresses of both ends of the connected TCP sockets among these, its own end first."""
    found = set()
    for view in _views(inodes):
        with contextlib.suppress(OSError):  # it is not connected
            if view.family == socket.AF_INET:
                found.add((_text(view.getsockname()), _text(view.getpeername())))
    return found


def close_ports(inodes: Collection[int]) -> None:
    """Has the kernel drop new connections to the listening ones of these sockets, where it allows that.

    A listening socket of gloo can be neither closed nor shut down.
    """
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter of one instruction: return 0
    program = struct.pack("HP", 1, ctypes.addressof(nothing))
    for view in _views(inodes):
        if view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            with contextlib.suppress(OSError):
                view.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _views(inodes: Collection[int]) -> Iterator[socket.socket]:
    for inode, fd in descriptors_by_inode().items():
        if inode in inodes:
            # A library may close its sockets at the same time.
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as view:
                yield view


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
