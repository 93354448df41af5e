"""The data plane of one epoch: tensors from worker to worker, overlapped with compute, and stoppable at any time.

Receives are posted ahead of use; one thread per sending worker waits for them in the order of posting and wakes the
main thread where it waits for any news. What is posted aside has a lane, and so a thread, of its own: it may be sent
before or after whatever else comes from that worker. Sends return at once and are reaped after the commit of their
step, which proves that they were received; one that is sent aside is let go as soon as it has been. Gloo has no way to
wake a blocked wait: a plane is left by shutting down its connected sockets, which ends every wait of the old epoch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroupGloo, Store, Work

from engine.core.errors import WorkerFailedError
from engine.models.layers import Tensors
from engine.runtime.ipc.control import Control
from engine.runtime.ipc.link import LOOPBACK
from engine.runtime.process.sockets import descriptors_by_inode, shut_down
from engine.runtime.transport.tensor_spec import MAX_TENSORS, Border

_JOIN_S = 0.05

Key = int  # names a transfer within a pair of workers and a step; the sender and the receiver compute the same
_Item = tuple[int, Key | None, Tensors, list[Work]]  # the peer, the key of what is received, and what is under way


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
        self._lanes: dict[tuple[object, ...], queue.SimpleQueue[_Item | None]] = {}
        self._waiters: list[threading.Thread] = []
        self._sends: list[tuple[int, list[Work], Tensors]] = []
        self.bytes_sent = 0

    def post(self, source: int, key: Key, border: Border, aside: object = None) -> None:
        """Posts the receive of one transfer from worker `source`; must be called in the order of sending in its lane.

        `aside` names a lane beside the usual one.
        """
        tensors = tuple(spec.empty() for spec in border)
        with _suspecting(f"transfer from worker {source}"):
            works = [
                self._group.recv([tensor], self._rank[source], key * MAX_TENSORS + part)
                for part, tensor in enumerate(tensors)
            ]
        self._lane("from", source, aside).put((source, key, tensors, works))

    def _lane(self, *name: object) -> queue.SimpleQueue[_Item | None]:
        if name not in self._lanes:
            self._lanes[name] = queue.SimpleQueue()
            waiter = threading.Thread(target=self._wait, args=(self._lanes[name],), name=f"{name}", daemon=True)
            self._waiters.append(waiter)
            waiter.start()
        return self._lanes[name]

    def has_arrived(self, source: int, key: Key) -> bool:
        """Says whether `take` would return at once."""
        return (source, key) in self._arrived

    def take_arrived(self, source: int, key: Key) -> Tensors | None:
        """Returns a posted transfer if it has arrived; it does not wait, and does not look whether it may."""
        return self._arrived.pop((source, key), None)

    def take(self, source: int, key: Key) -> Tensors:
        """Waits for a posted transfer, returns its tensors; raises Stopped, or WorkerFailedError if the pair broke."""

        def look() -> Tensors | None:
            if self._failed is not None:
                raise self._failed
            return self.take_arrived(source, key)

        return self.control.wait_until(look)

    def send(self, target: int, key: Key, tensors: Tensors) -> None:
        """Starts one transfer to worker `target`; the tensors must not change before the step is committed."""
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        self._sends.append((target, self._begin(target, key, sent), sent))

    def send_aside(self, target: int, key: Key, tensor: Tensor) -> None:
        """Starts a transfer of one tensor, which must not change before it has been received, and is let go then."""
        self._lane("to", target).put((target, None, (tensor,), self._begin(target, key, (tensor,))))

    def _begin(self, target: int, key: Key, tensors: Tensors) -> list[Work]:
        self.bytes_sent += sum([tensor.nbytes for tensor in tensors])
        try:
            return [
                self._group.send([tensor], self._rank[target], key * MAX_TENSORS + part)
                for part, tensor in enumerate(tensors)
            ]
        except RuntimeError as error:
            raise _suspicion(f"transfer to worker {target}", error) from error

    def reap(self) -> None:
        """Releases the sends of a committed step; none of them can block any more."""
        for target, works, _ in self._sends:
            with _suspecting(f"transfer to worker {target}"):
                for work in works:
                    work.wait()
        self._sends = []

    def close(self) -> None:
        """Leaves the plane, whatever is still under way; returns within milliseconds."""
        for lane in self._lanes.values():
            lane.put(None)
        shut_down(self._sockets)
        for waiter in self._waiters:
            waiter.join(_JOIN_S)
        self._sends = []

    def _wait(self, lane: queue.SimpleQueue[_Item | None]) -> None:
        while (item := lane.get()) is not None:
            peer, key, tensors, works = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._failed = _suspicion(f"transfer {'to' if key is None else 'from'} worker {peer}", error)
                self.control.wake()
                return
            if key is not None:
                self._arrived[peer, key] = tensors
                self.control.wake()
            del item, tensors, works  # nothing is held while this thread waits


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
