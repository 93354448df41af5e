"""The data plane of one epoch: point-to-point transfers of tensors, overlapped with compute, abortable at any time.

Receives are posted ahead of use. Each source has a channel: a thread that waits for its receives in the order of
posting and wakes the main thread. A named channel (`channel`) has its own thread, and its order does not depend on
other channels. Sends return at once. `reap` releases them after the commit of their step, which proves that they were
received; `send_on_own_channel` releases its tensor as soon as it is sent. Gloo cannot wake a blocked wait, so `close`
shuts down the sockets of the group, which ends every wait of the old epoch.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import Tensor
from torch.distributed import Store, Work

from engine.core.errors import TransferFailedError
from engine.models.layers import Tensors
from engine.runtime.process.sockets import shut_down
from engine.runtime.transport.pair_guard import UNGUARDED, PairGuard
from engine.runtime.transport.tensor_spec import MAX_TENSORS, Border

_JOIN_S = 0.05

Found = TypeVar("Found")
Key = int  # identifies a transfer between two workers in a step; sender and receiver compute the same key
_Item = tuple[int, Key | None, Tensors, list[Work]]  # (peer, key of a receive or None for a send, tensors, works)


class Waiter(Protocol):
    """The place where the main thread of a worker waits; the control thread provides it."""

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits until `look`, called again after each `wake`, finds something; may raise to end the wait."""

    def wake(self) -> None:
        """Has the main thread look again."""


class DataPlane:
    """Point-to-point transfers among `workers`; `workers[rank]` has that rank in this epoch's group.

    The constructor returns when all workers have joined; raises TransferFailedError if one does not within `timeout_s`.
    `guard` keeps strangers out; it wants a `name` that no other group of the run has.
    """

    def __init__(
        self,
        waiter: Waiter,
        store: Store,
        worker: int,
        workers: Sequence[int],
        timeout_s: float = 1800.0,
        *,
        guard: PairGuard = UNGUARDED,
        name: str = "",
    ):
        self._waiter = waiter
        self._rank = {each: rank for rank, each in enumerate(workers)}
        with suspecting("joining the others"):
            formed = guard.form(store, name, worker, workers, timeout_s)
        self._group, self._sockets = formed.gloo, formed.sockets
        self._arrived: dict[tuple[int, Key], Tensors] = {}
        self._failed: TransferFailedError | None = None
        self._channels: dict[tuple[object, ...], queue.SimpleQueue[_Item | None]] = {}
        self._waiters: list[threading.Thread] = []
        self._sends: list[tuple[int, list[Work], Tensors]] = []
        self.bytes_sent = 0

    def post(self, source: int, key: Key, border: Border, channel: object = None) -> None:
        """Posts the receive of one transfer from worker `source`, in the order of sending within a channel.

        `channel` names a channel other than the usual one of `source`.
        """
        tensors = tuple(spec.empty() for spec in border)
        with suspecting(f"transfer from worker {source}", source):
            works = [
                self._group.recv([tensor], self._rank[source], key * MAX_TENSORS + part)
                for part, tensor in enumerate(tensors)
            ]
        self._channel("from", source, channel).put((source, key, tensors, works))

    def _channel(self, *name: object) -> queue.SimpleQueue[_Item | None]:
        if name not in self._channels:
            self._channels[name] = queue.SimpleQueue()
            waiter = threading.Thread(target=self._wait, args=(self._channels[name],), name=f"{name}", daemon=True)
            self._waiters.append(waiter)
            waiter.start()
        return self._channels[name]

    def has_arrived(self, source: int, key: Key) -> bool:
        """Returns whether `take` would return at once."""
        return (source, key) in self._arrived

    def take_arrived(self, source: int, key: Key) -> Tensors | None:
        """Returns the tensors of a posted transfer, or None if it has not arrived; never waits, never raises."""
        return self._arrived.pop((source, key), None)

    def take(self, source: int, key: Key) -> Tensors:
        """Waits for a posted transfer and returns its tensors; raises Stopped, or TransferFailedError if it broke."""

        def look() -> Tensors | None:
            if self._failed is not None:
                raise self._failed
            return self.take_arrived(source, key)

        return self._waiter.wait_until(look)

    def send(self, target: int, key: Key, tensors: Tensors) -> None:
        """Starts one transfer to worker `target`; the tensors must not change before the commit of the step."""
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        self._sends.append((target, self._begin(target, key, sent), sent))

    def send_on_own_channel(self, target: int, key: Key, tensor: Tensor) -> None:
        """Starts a transfer of one tensor, which must not change; the plane releases it once it is sent."""
        self._channel("to", target).put((target, None, (tensor,), self._begin(target, key, (tensor,))))

    def _begin(self, target: int, key: Key, tensors: Tensors) -> list[Work]:
        self.bytes_sent += sum([tensor.nbytes for tensor in tensors])
        try:
            return [
                self._group.send([tensor], self._rank[target], key * MAX_TENSORS + part)
                for part, tensor in enumerate(tensors)
            ]
        except RuntimeError as error:
            raise _suspicion(f"transfer to worker {target}", error, target) from error

    def reap(self) -> None:
        """Releases the sends of a committed step. It does not block: they have all been received."""
        for target, works, _ in self._sends:
            with suspecting(f"transfer to worker {target}", target):
                for work in works:
                    work.wait()
        self._sends = []

    def close(self) -> None:
        """Aborts all transfers and leaves the group, within milliseconds."""
        for channel in self._channels.values():
            channel.put(None)
        shut_down(self._sockets)
        for waiter in self._waiters:
            waiter.join(_JOIN_S)
        self._sends = []

    def _wait(self, channel: queue.SimpleQueue[_Item | None]) -> None:
        while (item := channel.get()) is not None:
            peer, key, tensors, works = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._failed = _suspicion(f"transfer {'to' if key is None else 'from'} worker {peer}", error, peer)
                self._waiter.wake()
                return
            if key is not None:
                self._arrived[peer, key] = tensors
                self._waiter.wake()
            del item, tensors, works  # so that a waiting thread keeps no tensor alive


def _suspicion(what: str, error: RuntimeError, peer: int | None) -> TransferFailedError:
    """Returns the exception for an error of gloo."""
    return TransferFailedError(f"{what} failed: {error}", peer)


@contextlib.contextmanager
def suspecting(what: str, peer: int | None = None) -> Iterator[None]:
    """Turns the RuntimeError of gloo into a TransferFailedError. Sends use `try` instead, to save microseconds."""
    try:
        yield
    except RuntimeError as error:
        raise _suspicion(what, error, peer) from error
