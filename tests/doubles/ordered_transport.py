"""A backend around another one that holds the messages in program order to their promise: no backend needs tags.

On each pair of workers of a group, the n-th receive that the taker posts has the key and the epoch of the n-th message
that the sender sends. Messages aside are found by their key; their order is free.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

from engine.models.layers import Tensors
from engine.runtime.device.device import Device
from engine.runtime.transport.transport import AsideKey, Border, Channel, Joining, ProgramKey, Traffic, Transport
from engine.runtime.worker.thread_worker import ThreadBackend, ThreadControl

_Ends = tuple[list[object], list[object]]  # (epoch, key) of what was sent, and of what was posted


class PairOrders:
    """What the workers of a run have sent and posted in program order, on each pair of each group."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pairs: dict[object, _Ends] = {}
        self.crossed: list[str] = []
        self.num_met = 0

    def note(self, pair: object, is_post: bool, key: object) -> None:
        """Notes one end of a message; a pair crosses if the other end of the same number has another key."""
        with self._lock:
            ends = self._pairs.setdefault(pair, ([], []))
            mine, others = ends[is_post], ends[not is_post]
            mine.append(key)
            if len(mine) <= len(others):
                self.num_met += 1
                if others[len(mine) - 1] != key:
                    sent, posted = (others[len(mine) - 1], key) if is_post else (key, others[len(mine) - 1])
                    self.crossed.append(f"{pair}: {posted} was posted where {sent} was sent")


class _OrderedChannel:
    def __init__(self, inner: Channel[ProgramKey], note: Callable[[bool, int, ProgramKey], None]):
        self._inner, self._note, self.device = inner, note, inner.device
        self.has_arrived, self.take, self.take_arrived = inner.has_arrived, inner.take, inner.take_arrived
        self.leaving = inner.leaving

    def post(self, source: int, key: ProgramKey, border: Border) -> None:
        """Posts the receive of one message."""
        self._note(True, source, key)
        self._inner.post(source, key, border)

    def send(self, target: int, key: ProgramKey, tensors: Tensors) -> None:
        """Starts one message."""
        self._note(False, target, key)
        self._inner.send(target, key, tensors)


class OrderedTransport:
    """A transport of `worker` in a group, whose messages in program order are compared."""

    def __init__(self, inner: Transport, orders: PairOrders, worker: int, group: object):
        self._inner, self._orders, self._worker, self._group = inner, orders, worker, group
        self.aside: Channel[AsideKey] = inner.aside
        self.in_order = _OrderedChannel(inner.in_order, self._note)
        self.release_sent, self.abandon, self.close = inner.release_sent, inner.abandon, inner.close
        self.begin, self.expect = inner.begin, inner.expect

    def _note(self, is_post: bool, other: int, key: ProgramKey) -> None:
        ends = (other, self._worker) if is_post else (self._worker, other)
        self._orders.note((self._group, *ends), is_post, (self.epoch, key))

    @property
    def epoch(self) -> int:
        """The epoch of the coming messages."""
        return self._inner.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._inner.epoch = epoch

    @property
    def bytes_sent(self) -> int:
        """The bytes of all messages that were begun here."""
        return self._inner.bytes_sent

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the numbers of messages by member."""
        return self._inner.traffic()


class OrderedJoining:
    """One attempt to join a group, whose transport is then ordered."""

    def __init__(self, inner: Joining, orders: PairOrders, worker: int, group: object):
        self._inner, self._given = inner, (orders, worker, group)
        self.abandon, self.may_wait = inner.abandon, inner.may_wait

    def join(self) -> OrderedTransport:
        """Waits until all members have joined."""
        return OrderedTransport(self._inner.join(), *self._given)


class OrderedBackend(ThreadBackend):
    """The groups of one worker; all workers of a run have the same `orders`."""

    def __init__(
        self, orders: PairOrders, life: object, control: ThreadControl, worker: int, device: Device, **of_job: bool
    ):
        super().__init__(life, control, worker, device, **of_job)
        self._orders, self._number = orders, worker

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> OrderedJoining:  # type: ignore[override]
        """Returns the attempt to join the group of an epoch."""
        group = (epoch, attempt, tuple(members))
        return OrderedJoining(super().joining(epoch, members, attempt), self._orders, self._number, group)
