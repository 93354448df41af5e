"""The transport over Gloo: transfers of one group, overlapped with compute, broken off at any time.

Receives are posted ahead of use. A queue has a thread that waits for its receives in the order of posting and wakes the
main thread: one for each source in program order, one for each source, purpose and slot aside. Sends return at once.
Those in program order are released after the commit of their step, which proves that they were received; those aside
have a queue for each target, whose thread releases them as soon as they are sent. Gloo cannot wake a blocked wait, so
`abandon` shuts down the sockets of the group, which ends every wait.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Generic

from torch.distributed import Work

from engine.core.errors import TransferFailedError
from engine.models.layers import Tensors
from engine.runtime.process.sockets import descriptors_by_inode, shut_down
from engine.runtime.transport.pair_guard import UNGUARDED, Group, PairGuard
from engine.runtime.transport.rendezvous import Rendezvous
from engine.runtime.transport.suspicion import suspecting, suspicion
from engine.runtime.transport.tensor_spec import MAX_TENSORS, Border
from engine.runtime.transport.transfer_key import AsideKey, ProgramKey
from engine.runtime.transport.transport import AnyKey, Traffic, Waiter

_JOIN_S = 0.05
_TIMEOUT_S = 1800.0

_Key = ProgramKey | AsideKey
_Item = tuple[int, _Key | None, Tensors, list[Work]]  # (peer, key of a receive or None for a send, tensors, works)
_QueueName = tuple[object, ...]


class _WorkQueue:
    """Works of gloo, with a thread that waits for them in order and tells what has arrived."""

    def __init__(self, name: _QueueName, wires: _Wires):
        self.items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self.num_received: dict[int, int] = {}
        self._wires = wires
        self.thread = threading.Thread(target=self._run, name=f"{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        wires = self._wires
        while (item := self.items.get()) is not None:
            peer, key, tensors, works = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                wires.failed = suspicion(f"transfer {'to' if key is None else 'from'} worker {peer}", error, peer)
                wires.waiter.wake()
                return
            if key is not None:
                wires.arrived[peer, key] = tensors
                self.num_received[peer] = self.num_received.get(peer, 0) + 1
                wires.waiter.wake()
            del item, tensors, works  # so that a waiting thread keeps no tensor alive


class _Wires:
    """The group, with what its two channels share."""

    def __init__(self, waiter: Waiter, group: Group, workers: Sequence[int]):
        self.waiter = waiter
        self.gloo = group.gloo
        self.rank = {each: rank for rank, each in enumerate(workers)}
        self.arrived: dict[tuple[int, _Key], Tensors] = {}
        self.failed: TransferFailedError | None = None
        self.queues: dict[_QueueName, _WorkQueue] = {}
        self.num_sent = dict.fromkeys(workers, 0)
        self.num_posted = dict.fromkeys(workers, 0)
        self.bytes_sent = 0

    def queue(self, name: _QueueName) -> _WorkQueue:
        """Returns the queue of a name, which it starts if there is none."""
        found = self.queues.get(name)
        if found is None:
            found = self.queues[name] = _WorkQueue(name, self)
        return found

    def begin(self, target: int, key: _Key, tensors: Tensors) -> list[Work]:
        """Begins the sends of one message."""
        self.bytes_sent += sum([tensor.nbytes for tensor in tensors])
        self.num_sent[target] += 1
        tag = key.number * MAX_TENSORS
        try:  # not `suspecting`, to save microseconds
            return [self.gloo.send([tensor], self.rank[target], tag + part) for part, tensor in enumerate(tensors)]
        except RuntimeError as error:
            raise suspicion(f"transfer to worker {target}", error, target) from error


class _GlooChannel(Generic[AnyKey]):
    """What both channels have."""

    def __init__(self, wires: _Wires):
        self._wires = wires

    def _queue_of(self, source: int, key: AnyKey) -> _QueueName:
        raise NotImplementedError

    def post(self, source: int, key: AnyKey, border: Border) -> None:
        """Posts the receive of one message."""
        wires = self._wires
        tensors = tuple(spec.empty() for spec in border)
        rank, tag = wires.rank[source], key.number * MAX_TENSORS
        with suspecting(f"transfer from worker {source}", source):
            works = [wires.gloo.recv([tensor], rank, tag + part) for part, tensor in enumerate(tensors)]
        wires.num_posted[source] += 1
        wires.queue(self._queue_of(source, key)).items.put((source, key, tensors, works))

    def has_arrived(self, source: int, key: AnyKey) -> bool:
        """Returns whether `take` would return at once."""
        return (source, key) in self._wires.arrived

    def take_arrived(self, source: int, key: AnyKey) -> Tensors | None:
        """Returns the tensors of a posted message, or None if it has not arrived; never waits, never raises."""
        return self._wires.arrived.pop((source, key), None)

    def take(self, source: int, key: AnyKey) -> Tensors:
        """Waits for a posted message and returns its tensors; raises Stopped, or TransferFailedError if it broke."""
        wires = self._wires

        def look() -> Tensors | None:
            if wires.failed is not None:
                raise wires.failed
            return self.take_arrived(source, key)

        return wires.waiter.wait_until(look)


class _InOrder(_GlooChannel[ProgramKey]):
    """The messages in program order."""

    def __init__(self, wires: _Wires):
        super().__init__(wires)
        self.sends: list[tuple[int, list[Work], Tensors]] = []

    def _queue_of(self, source: int, key: ProgramKey) -> _QueueName:
        return ("from", source)

    def send(self, target: int, key: ProgramKey, tensors: Tensors) -> None:
        """Starts one message; the tensors must not change before the commit of the step."""
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        self.sends.append((target, self._wires.begin(target, key, sent), sent))


class _Aside(_GlooChannel[AsideKey]):
    """The messages aside."""

    def _queue_of(self, source: int, key: AsideKey) -> _QueueName:
        return ("from", source, *key[:3])

    def send(self, target: int, key: AsideKey, tensors: Tensors) -> None:
        """Starts one message; its tensors are released once they are sent."""
        sent = tuple(tensor.detach().contiguous() for tensor in tensors)
        self._wires.queue(("to", target)).items.put((target, None, sent, self._wires.begin(target, key, sent)))


class GlooTransport:
    """The messages among `workers`; `workers[rank]` has that rank in the group."""

    def __init__(self, waiter: Waiter, group: Group, workers: Sequence[int], epoch: int):
        self.epoch = epoch
        self._sockets = group.sockets
        self._wires = _Wires(waiter, group, workers)
        self.in_order = _InOrder(self._wires)
        self.aside = _Aside(self._wires)

    @property
    def bytes_sent(self) -> int:
        """The bytes of all messages that were begun here."""
        return self._wires.bytes_sent

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the numbers of messages in both channels by other member."""
        wires = self._wires
        received = dict.fromkeys(wires.rank, 0)
        for each in list(wires.queues.values()):
            for peer, number in list(each.num_received.items()):
                received[peer] += number
        return {peer: Traffic(sent, wires.num_posted[peer], received[peer]) for peer, sent in wires.num_sent.items()}

    def release_sent(self) -> None:
        """Releases the messages of a committed step. It does not block: they have all been received."""
        for target, works, _ in self.in_order.sends:
            with suspecting(f"transfer to worker {target}", target):
                for work in works:
                    work.wait()
        self.in_order.sends = []

    def abandon(self) -> None:
        """Breaks off all messages and leaves the group, within milliseconds."""
        for each in self._wires.queues.values():
            each.items.put(None)
        shut_down(self._sockets)
        for each in self._wires.queues.values():
            each.thread.join(_JOIN_S)
        self.in_order.sends = []

    def close(self) -> None:
        """Leaves the group: its sockets have nothing on their way."""
        self.abandon()


class GlooJoining:
    """One attempt to form a group of gloo, whose constructor returns when all members have joined.

    If one dies first, the constructor would block for long. `abandon` therefore shuts down its sockets, and ends its
    wait at the rendezvous.
    """

    def __init__(
        self,
        waiter: Waiter,
        store: Rendezvous,
        worker: int,
        members: Sequence[int],
        epoch: int = 0,
        *,
        guard: PairGuard = UNGUARDED,
        name: str = "",
        timeout_s: float = _TIMEOUT_S,
    ):
        """`guard` keeps strangers out; it wants a `name` that no other group of the run has."""
        self._waiter, self._store, self._guard = waiter, store, guard
        self._worker, self._members, self._epoch = worker, members, epoch
        self._name, self._timeout_s = name, timeout_s
        self._before = descriptors_by_inode().keys()

    def join(self) -> GlooTransport:
        """Returns the transport when all members have joined; raises TransferFailedError if one does not in time."""
        with suspecting("joining the others"):
            group = self._guard.form(self._store, self._name, self._worker, self._members, self._timeout_s)
        return GlooTransport(self._waiter, group, self._members, self._epoch)

    def abandon(self) -> None:
        """Ends a `join` in another thread."""
        self._store.give_up()
        shut_down(descriptors_by_inode().keys() - self._before)
