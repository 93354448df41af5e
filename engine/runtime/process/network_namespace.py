"""The network namespace of a run: sockets that are made in it stay in it, and no other process can reach them.

The kernel makes one for a process with CAP_SYS_ADMIN. A process without it would need a user namespace, in which the
user's code would be another one: see docs/decisions.md. A namespace belongs to threads: one thread of a worker makes
the sockets of its group inside, while the user's code keeps the network of the host.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import threading
from collections.abc import Iterator

_CLONE_NEWNET = 0x40000000
_SIOCSIFFLAGS = 0x8914
_IFF_UP_AND_RUNNING = 0x41
_OWN = "/proc/thread-self/ns/net"

_libc = ctypes.CDLL(None, use_errno=True)


def new_network() -> int:
    """Returns a descriptor of a new network namespace that has loopback only; raises OSError if the kernel refuses."""
    made: list[int | OSError] = []

    def make() -> None:
        try:
            _call("unshare", _CLONE_NEWNET)
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
                fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP_AND_RUNNING))
            made.append(os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC))
        except OSError as error:
            made.append(error)

    # A thread of its own, which ends with the call: this thread stays in the network of the host.
    thread = threading.Thread(target=make, name="network")
    thread.start()
    thread.join()
    if isinstance(made[0], OSError):
        raise made[0]
    return made[0]


@contextlib.contextmanager
def inside(network: int) -> Iterator[None]:
    """Puts this thread, and threads that it starts, into a namespace; the thread is back behind the block."""
    before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _call("setns", network, _CLONE_NEWNET)
        try:
            yield
        finally:
            _call("setns", before, _CLONE_NEWNET)
    finally:
        os.close(before)


def _call(name: str, *arguments: int) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
