"""The links that an agent makes between workers of its host: a socket pair and two rings, with no name and no port.

Each worker gets its ends over its own link to the agent, so that no third process can have one. The agent keeps none: the
end of a worker is the end of its links. A pair of workers has one link, however often both ask for it, and gets another
one only for one that has ended.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket

from engine.core.process_messages import LinkMessage
from engine.runtime.agent.worker_handles import WorkerHandle

RING_BYTES = 64 << 20  # takes memory as far as it was written; an empty ring begins again at its first byte
COUNT_BYTES = 64
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW  # a reader of a shorter file would end by SIGBUS

_Process = tuple[int, int]  # a worker and its process: another one may have its number later


class LinkPairs:
    """The links between the workers of one host."""

    def __init__(self) -> None:
        self._made: dict[frozenset[_Process], int] = {}
        self._count = 0

    def link(self, one: WorkerHandle, other: WorkerHandle | None, before: int) -> None:
        """Makes the link of two workers, unless one has ended, or they have got another one since the link `before`."""
        if other is None or other is one or other.exit_code is not None or one.exit_code is not None:
            return
        pair = frozenset(((one.worker, one.child.pid), (other.worker, other.child.pid)))
        if self._made.get(pair, before) != before:
            return
        self._count += 1
        self._made[pair] = self._count
        with contextlib.ExitStack() as stack:
            near, far = socket.socketpair()
            stack.callback(near.close)
            stack.callback(far.close)
            there, back = _ring(stack), _ring(stack)
            one.link.send(LinkMessage(other.worker, self._count), (near.fileno(), there, back))
            other.link.send(LinkMessage(one.worker, self._count), (far.fileno(), back, there))


def _ring(stack: contextlib.ExitStack) -> int:
    """Returns the descriptor of memory that the two workers of a link share."""
    fd = os.memfd_create("bamboo-ring", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, fd)
    os.ftruncate(fd, RING_BYTES + COUNT_BYTES)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
    return fd
