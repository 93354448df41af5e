"""The data plane of one epoch: tensors from worker to worker, overlapped with compute, and stoppable at any time.

Receives are posted ahead of use; one thread per sending worker waits for them in the order of posting and wakes the
main thread where it waits for any news. Sends return at once and are reaped after the commit of their step, which
proves that they were received. Gloo has no way to wake a blocked wait: a plane is left by shutting down its connected
sockets, which ends every wait of the old epoch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroupGloo, Store, Work

from engine.core.errors import WorkerFailedError
from engine.models.layers import Tensors
from engine.runtime.control import Control
from engine.runtime.link import LOOPBACK
from engine.runtime.sockets import descriptors_by_inode, shut_down
from engine.runtime.tensor_spec import Border

_JOIN_S = 0.05
_PARTS = 16  # tensors in one transfer, at most

Key = int  # names a transfer within a pair of workers and a step; the sender and the receiver compute the same


class DataPlane:
    """Point-to-point transfers among `workers`; `workers[rank]` has that rank in this epoch's group."""

    def __init__(self, control: Control, store: Store, worker: int, workers: Sequence[int], timeout_s: float = 1800.0):
        self.control = control
        self._rank = {each: rank for rank, each in enumerate(workers)}
        before = descriptors_by_inode().keys()
        with _suspecting("joining the others"):
            self._group = _gloo(store, self._rank[worker], len(workers), timeout_s)
        self._sockets = descriptors_by_inode().keys() - before
        self._arrived: dict[tuple[int, Key], Tensors] = {}
        self._failed: WorkerFailedError | None = None
        self._posted: dict[int, queue.SimpleQueue[tuple[Key, Tensors, list[Work]] | None]] = {}
        self._waiters: list[threading.Thread] = []
        self._sends: list[tuple[int, list[Work], Tensors]] = []

    def post(self, source: int, key: Key, border: Border) -> None:
        """Posts the receive of one transfer from worker `source`; must be called in the order of sending."""
        tensors = tuple(spec.empty() for spec in border)
        with _suspecting(f"transfer from worker {source}"):
            works = [
                self._group.recv([tensor], self._rank[source], key * _PARTS + part)
                for part, tensor in enumerate(tensors)
            ]
        if source not in self._posted:
            self._posted[source] = queue.SimpleQueue()
            waiter = threading.Thread(target=self._wait, args=(source,), name=f"from-{source}", daemon=True)
            self._waiters.append(waiter)
            waiter.start()
        self._posted[source].put((key, tensors, works))

    def has_arrived(self, source: int, key: Key) -> bool:
        """Says whether `take` would return at once."""
        return (source, key) in self._arrived

    def take(self, source: int, key: Key) -> Tensors:
        """Waits for a posted transfer, returns its tensors; raises Stopped, or WorkerFailedError if the pair broke."""

        def look() -> Tensors | None:
            if self._failed is not None:
                raise self._failed
            return self._arrived.pop((source, key), None)

        return self.control.wait_until(look)

    def send(self, target: int, key: Key, tensors: Tensors) -> None:
        """Starts one transfer to worker `target`; the tensors must not change before the step is committed."""
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        try:
            works = [
                self._group.send([tensor], self._rank[target], key * _PARTS + part) for part, tensor in enumerate(sent)
            ]
        except RuntimeError as error:
            raise _suspicion(f"transfer to worker {target}", error) from error
        self._sends.append((target, works, sent))

    def reap(self) -> None:
        """Releases the sends of a committed step; none of them can block any more."""
        for target, works, _ in self._sends:
            with _suspecting(f"transfer to worker {target}"):
                for work in works:
                    work.wait()
        self._sends = []

    def close(self) -> None:
        """Leaves the plane, whatever is still under way; returns within milliseconds."""
        for waiting in self._posted.values():
            waiting.put(None)
        shut_down(self._sockets)
        for waiter in self._waiters:
            waiter.join(_JOIN_S)
        self._sends = []

    def _wait(self, source: int) -> None:
        posted = self._posted[source]
        while (item := posted.get()) is not None:
            key, tensors, works = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._failed = _suspicion(f"transfer from worker {source}", error)
                self.control.wake()
                return
            self._arrived[source, key] = tensors
            self.control.wake()


def _suspicion(what: str, error: RuntimeError) -> WorkerFailedError:
    """Returns what to raise for what gloo raises: a broken transfer does not say who died."""
    return WorkerFailedError(f"{what} failed: {error}")


@contextlib.contextmanager
def _suspecting(what: str) -> Iterator[None]:
    """Raises a suspicion for what gloo raises; where every microsecond counts, `try` stands in its place."""
    try:
        yield
    except RuntimeError as error:
        raise _suspicion(what, error) from error


def _gloo(store: Store, rank: int, size: int, timeout_s: float) -> Any:  # torch's stubs lack its methods
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=LOOPBACK)]
    options._timeout = timedelta(seconds=timeout_s)
    return ProcessGroupGloo(store, rank, size, options)
