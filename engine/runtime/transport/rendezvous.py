"""The rendezvous store of a run: a process of its own, so that it does not die with a worker.

It listens on a loopback socket that its launcher has bound; torch's store itself would listen on every interface.
"""

from __future__ import annotations

import socket
from collections.abc import Collection
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from engine.core.errors import WorkerFailedError
from engine.core.process_messages import ServingMessage
from engine.runtime.ipc.link import LOOPBACK, Link
from engine.runtime.process.sockets import descriptors_by_inode, shut_down

_TIMEOUT = timedelta(seconds=60)  # of a wait for a key
_CONNECT = timedelta(seconds=5)  # torch's client retries for so long, even if the store is stopped or ends


def main(control_fd: int, listener_fd: int) -> int:
    """Serves until the launcher closes the control link; sends "serving" at the start and after each message."""
    listener = socket.socket(fileno=listener_fd)
    port = listener.getsockname()[1]
    listener.detach()  # torch's store takes the descriptor over
    control = Link.from_fd(control_fd)
    store = TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listener_fd)
    control.send(ServingMessage())
    while control.receive() is not None:
        control.send(ServingMessage())
    del store
    return 0


def connect(port: int, prefix: str) -> PrefixStore:
    """Connects to the store on `port`; returns a view of the keys under `prefix`."""
    return PrefixStore(prefix, _connected(port))


def _connected(port: int) -> TCPStore:
    client = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=_CONNECT)
    client.set_timeout(_TIMEOUT)
    return client


class Rendezvous:
    """This process's connection to the store, kept across epochs as long as they name the same store.

    A wait for a key that never comes blocks the connection; `hang_up` ends it, and the next epoch connects again.
    """

    def __init__(self) -> None:
        self._port = 0
        self._client: TCPStore | None = None
        self._sockets: Collection[int] = ()

    def of_epoch(self, epoch: int, port: int) -> PrefixStore:
        """Returns the keys of an epoch in the store that listens on `port`.

        Raises WorkerFailedError if the store cannot be reached: it may have just ended.
        """
        if self._client is None or port != self._port:
            before = descriptors_by_inode().keys()
            try:
                socket.create_connection((LOOPBACK, port)).close()  # fails at once; torch's client would retry
                self._client = _connected(port)
            except (OSError, RuntimeError) as error:
                raise WorkerFailedError(f"the rendezvous store cannot be reached: {error}") from error
            self._port = port
            self._sockets = descriptors_by_inode().keys() - before
        return PrefixStore(f"epoch-{epoch}", self._client)

    def hang_up(self) -> None:
        """Shuts down the connection, which ends a wait on it."""
        shut_down(self._sockets)
        self._client = None
