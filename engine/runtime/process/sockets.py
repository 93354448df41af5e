"""The sockets that libraries open in this process: found by inode, and shut down to end blocking calls on them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Collection


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
    for inode, fd in descriptors_by_inode().items():
        if inode not in inodes:
            continue
        # Gloo may close its sockets at the same time, if a peer leaves first.
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as view:
            # A listening socket is left out: gloo aborts the process if it is shut down.
            if not view.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                view.shutdown(socket.SHUT_RDWR)
