"""The rendezvous store of a run: a process of its own, so that it cannot die with a worker.

It listens on a loopback socket that was bound before, because torch's store would else listen on every interface.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from engine.runtime.link import LOOPBACK, Link

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
    return PrefixStore(prefix, TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False, timeout=_TIMEOUT))
