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
from collections.abc import Collection, Sequence
from typing import Any

from torch.distributed import Work

from engine.models.layers import MAX_TENSORS, Tensors
from engine.runtime.device.device import HOST, Device
from engine.runtime.process.sockets import descriptors_by_inode, shut_down
from engine.runtime.transport.group_end import EndChannel, GroupEnd
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.pair_guard import UNGUARDED, Group, PairGuard, gather
from engine.runtime.transport.rendezvous import Rendezvous
from engine.runtime.transport.suspicion import suspecting, suspicion
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transfer_key import AsideKey, ProgramKey
from engine.runtime.transport.transport import AnyKey

_JOIN_S = 0.05
_TIMEOUT_S = 1800.0

_Key = ProgramKey | AsideKey
_Item = tuple[int, _Key | None, Tensors, list[Work]]  # (peer, key of a receive or None for a send, tensors, works)
_QueueName = tuple[object, ...]


class _WorkQueue:
    """Works of gloo, with a thread that waits for them in order and tells what has arrived."""

    def __init__(self, name: _QueueName, end: GlooTransport):
        self.items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._end = end
        self.thread = threading.Thread(target=self._run, name=f"{name}", daemon=True)
        self.thread.start()

    def _run(self) -> None:
        while (item := self.items.get()) is not None:
            peer, key, tensors, works = item
            try:
                for work in works:
                    work.wait()
            except RuntimeError as error:
                self._end.fails(suspicion(f"transfer {'to' if key is None else 'from'} worker {peer}", error, peer))
                return
            if key is not None:
                self._end.arrives(peer, key, tensors)
            del item, tensors, works  # so that a waiting thread keeps no tensor alive


class _LeftGroup:
    """Stands for a group that was left, whose memory, threads and sockets are free."""

    def send(self, *_: object) -> Work:
        """Refuses a transfer, as gloo does on a broken connection."""
        raise RuntimeError("the group was left")

    recv = send


class _GlooChannel(EndChannel[AnyKey]):
    """The parts of both channels that are gloo's."""

    def __init__(self, end: GlooTransport):
        super().__init__(end)
        self._end = end

    def _queue_of(self, source: int, key: AnyKey) -> _QueueName:
        raise NotImplementedError

    def post(self, source: int, key: AnyKey, border: Border) -> None:
        """Posts the receive of one message."""
        end = self._end
        tensors = tuple(spec.room(end.device) for spec in border)
        rank, tag = end.rank[source], key.number * MAX_TENSORS
        with suspecting(f"transfer from worker {source}", source):
            works = [end.gloo.recv([tensor], rank, tag + part) for part, tensor in enumerate(tensors)]
        end.num_posted[source] += 1
        end.queue(self._queue_of(source, key)).items.put((source, key, tensors, works))

    def _begin_works(self, target: int, key: AnyKey, tensors: Tensors) -> tuple[Tensors, list[Work]]:
        """Begins the sends of one message; returns the tensors that must stay until they are done."""
        end, sent = self._end, tuple(tensor.detach().contiguous() for tensor in tensors)
        rank, tag = end.rank[target], key.number * MAX_TENSORS
        try:  # not `suspecting`, to save microseconds
            return sent, [end.gloo.send([tensor], rank, tag + part) for part, tensor in enumerate(sent)]
        except RuntimeError as error:
            raise suspicion(f"transfer to worker {target}", error, target) from error


class _InOrder(_GlooChannel[ProgramKey]):
    """The messages in program order."""

    def __init__(self, end: GlooTransport):
        super().__init__(end)
        self.sends: list[tuple[int, list[Work], Tensors]] = []

    def _queue_of(self, source: int, key: ProgramKey) -> _QueueName:
        return ("from", source)

    def _begin(self, target: int, key: ProgramKey, tensors: Tensors) -> None:
        sent, works = self._begin_works(target, key, tensors)
        self.sends.append((target, works, sent))


class _Aside(_GlooChannel[AsideKey]):
    """The messages aside."""

    def _queue_of(self, source: int, key: AsideKey) -> _QueueName:
        return ("from", source, *key[:3])

    def _begin(self, target: int, key: AsideKey, tensors: Tensors) -> None:
        self._end.queue(("to", target)).items.put((target, None, *self._begin_works(target, key, tensors)))


class GlooTransport(GroupEnd):
    """The messages among `workers`; `workers[rank]` has that rank in the group."""

    in_order: _InOrder

    def __init__(self, cuts: LinkCuts, group: Group, workers: Sequence[int], epoch: int, device: Device):
        super().__init__(cuts, workers, epoch, device)
        self.gloo: Any = group.gloo
        self.rank = {each: rank for rank, each in enumerate(workers)}
        self._sockets: Collection[int] = group.sockets
        self._queues: dict[_QueueName, _WorkQueue] = {}
        self.in_order = _InOrder(self)
        self.aside = _Aside(self)

    def queue(self, name: _QueueName) -> _WorkQueue:
        """Returns the queue of a name, which it starts if there is none."""
        found = self._queues.get(name)
        if found is None:
            found = self._queues[name] = _WorkQueue(name, self)
        return found

    def release_sent(self) -> None:
        """Releases the messages of a committed step. It does not block: they have all been received."""
        sends, self.in_order.sends = self.in_order.sends, []
        for target, works, _ in sends:
            with suspecting(f"transfer to worker {target}", target):
                for work in works:
                    work.wait()

    def abandon(self) -> None:
        """Breaks off all messages and leaves the group, within milliseconds."""
        self.cuts.leave(self)
        for each in list(self._queues.values()):  # a thread that sends may start one
            each.items.put(None)
        shut_down(self._sockets)
        for each in list(self._queues.values()):
            each.thread.join(_JOIN_S)
        self.in_order.sends = []
        # The channels and this end refer to each other: without these lines the group waits for a search for garbage.
        self._queues, self._sockets = {}, ()
        self.gloo = _LeftGroup()

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
        cuts: LinkCuts,
        store: Rendezvous,
        worker: int,
        members: Sequence[int],
        epoch: int = 0,
        *,
        device: Device = HOST,
        guard: PairGuard = UNGUARDED,
        name: str = "",
        timeout_s: float = _TIMEOUT_S,
        in_advance: bool = False,
    ):
        """`guard` keeps strangers out; it wants a `name` that no other group of the run has.

        `in_advance`: training goes on in the present group meanwhile. Then no socket is opened before all have come.
        """
        self._cuts, self._store, self._guard = cuts, store, guard
        self._worker, self._members, self._epoch = worker, members, epoch
        self._name, self._timeout_s, self._device = name, timeout_s, device
        self._in_advance = in_advance
        self._before = None if in_advance else descriptors_by_inode().keys()
        self._is_abandoned = False

    def join(self) -> GlooTransport:
        """Returns the transport when all members have joined; raises TransferFailedError if one does not in time."""
        self._cuts.await_whole(self._members, lambda: self._is_abandoned)
        with suspecting("joining the others"):
            if self._in_advance:
                gather(self._store, self._worker, self._members, self._timeout_s)
                self._before = descriptors_by_inode().keys()
            group = self._guard.form(self._store, self._name, self._worker, self._members, self._timeout_s)
        transport = GlooTransport(self._cuts, group, self._members, self._epoch, self._device)
        if not self._in_advance:
            transport.begin()
        return transport

    def abandon(self) -> None:
        """Ends a `join` in another thread."""
        self._is_abandoned = True
        self._store.give_up()
        if self._before is not None:
            shut_down(descriptors_by_inode().keys() - self._before)
