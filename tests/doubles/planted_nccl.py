"""Mistakes with NCCL that a worker makes on purpose, so that a test sees them caught."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from engine.runtime.transport.nccl_library import NcclLibrary
from engine.runtime.transport.nccl_queue import Header, IssueQueue
from engine.runtime.transport.transport import Issued

_LATE_S = 0.3


def _second_thread() -> None:
    """Looks for errors in another thread than the one of NCCL."""
    progress = NcclLibrary.progress

    def elsewhere(self: NcclLibrary, communicator: ctypes.c_void_p) -> bool:
        thread = threading.Thread(
            target=self._c.ncclCommGetAsyncError, args=(communicator, ctypes.byref(ctypes.c_int()))
        )
        thread.start()
        thread.join()
        return progress(self, communicator)

    NcclLibrary.progress = elsewhere  # type: ignore[method-assign]


def _two_communicators() -> None:
    """Gives work of two communicators in one group of calls."""
    begin_join, send = NcclLibrary.begin_join, NcclLibrary.send
    alone: list[ctypes.c_void_p] = []

    def with_another(self: NcclLibrary, group_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        if not alone:
            alone.append(begin_join(self, self.new_id(), 0, 1))
        return begin_join(self, group_id, rank, size)

    def to_both(
        self: NcclLibrary, communicator: ctypes.c_void_p, at: int, num_bytes: int, rank: int, stream: int
    ) -> None:
        send(self, communicator, at, num_bytes, rank, stream)
        self._c.ncclSend(at, num_bytes, 1, 0, alone[0], stream)

    NcclLibrary.begin_join, NcclLibrary.send = with_another, to_both  # type: ignore[method-assign]


def _swap() -> None:
    """Swaps the first two sends of a program."""
    expect = IssueQueue.expect

    def swapped(self: IssueQueue, ends: Sequence[tuple[Issued, Header | None]]) -> None:
        order = list(ends)
        first, second, *_ = [number for number, (issued, _) in enumerate(order) if issued.is_send] + [0, 0]
        order[first], order[second] = order[second], order[first]
        expect(self, order)

    IssueQueue.expect = swapped  # type: ignore[method-assign]


def _abort_at_once() -> None:
    """Aborts a group that is left, while others may be at work in it: the first rank hears of it late."""
    abort, begin_join, aborted = NcclLibrary.abort, NcclLibrary.begin_join, set[int | None]()
    ranks: dict[int | None, int] = {}

    def noted(self: NcclLibrary, group_id: bytes, rank: int, size: int) -> ctypes.c_void_p:
        made = begin_join(self, group_id, rank, size)
        ranks[made.value] = rank
        return made

    def at_once(self: NcclLibrary, communicator: ctypes.c_void_p) -> None:
        if communicator.value not in aborted:
            aborted.add(communicator.value)
            time.sleep(0 if ranks[communicator.value] else _LATE_S)
            abort(self, communicator)

    NcclLibrary.begin_join, NcclLibrary.revoke, NcclLibrary.abort = noted, at_once, at_once  # type: ignore[method-assign]


_MISTAKES: dict[str, Callable[[], None]] = {
    "second thread": _second_thread,
    "two communicators": _two_communicators,
    "swap": _swap,
    "abort at once": _abort_at_once,
}


def plant(mistake: str) -> None:
    """Has this process make a mistake from now on."""
    _MISTAKES[mistake]()
