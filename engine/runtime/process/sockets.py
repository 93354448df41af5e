"""The sockets that libraries open in this process: told apart by inode, shut down to end what blocks on them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection


def descriptors_by_inode() -> dict[int, int]:
    """Returns this process's sockets; a descriptor's number may be used again, an inode not."""
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
    """Ends every transfer and wait on those of these sockets that are connected; they stay open."""
    for inode, fd in descriptors_by_inode().items():
        if inode not in inodes:
            continue
        # Gloo closes sockets of its own accord while this runs, when a peer leaves first.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as view:
            # Shutting down a listening socket would end the process: gloo takes it for a fatal error.
            if not view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                view.shutdown(socket.SHUT_RDWR)
