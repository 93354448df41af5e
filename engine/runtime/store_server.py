"""The rendezvous store of a run: a process of its own, so that it cannot die with a worker.

It listens on a loopback socket that was bound before, because torch's store would else listen on every interface.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from engine.runtime.link import LOOPBACK, Link
from engine.runtime.sockets import descriptors_by_inode, shut_down

_TIMEOUT = timedelta(seconds=60)


def main(listener_fd: int, control_fd: int) -> int:
    """Serves until the launcher closes the control link."""
    listener = socket.socket(fileno=listener_fd)
    port = listener.getsockname()[1]
    listener.detach()  # torch's store takes the descriptor over
    control = Link.from_fd(control_fd)
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener_fd)
    control.send("serving")
    control.receive()
    del store
    return 0


def connect(port: int, prefix: str) -> PrefixStore:
    """Returns this process's view of the store, under `prefix`."""
    return PrefixStore(prefix, _connected(port))


def _connected(port: int) -> TCPStore:
    return TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT)


class Rendezvous:
    """This process's connection to the store, kept from one epoch to the next.

    A wait for what never comes holds the connection; hanging up ends it, and the next epoch connects anew.
    """

    def __init__(self, port: int):
        self._port = port
        self._connect()

    def _connect(self) -> None:
        before = descriptors_by_inode().keys()
        self._client: TCPStore | None = _connected(self._port)
        self._sockets = descriptors_by_inode().keys() - before

    def of_epoch(self, epoch: int) -> PrefixStore:
        """Returns the view of the store that belongs to an epoch."""
        if self._client is None:
            self._connect()
        assert self._client is not None
        return PrefixStore(f"epoch-{epoch}", self._client)

    def hang_up(self) -> None:
        """Ends the wait that holds the connection."""
        shut_down(self._sockets)
        self._client = None
