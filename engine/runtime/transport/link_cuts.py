"""Cut connections: a backend around another one, whose messages to and from a member can be held up without a sign.

    there   messages to the member are kept, in their order; the sender does not notice
    back    messages from the member do not arrive, from the cut on
    join    a group with a member behind a cut does not form

A cut outlives its group. Once it is healed, the kept messages are sent, as if they had been late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Generic

from engine.core.errors import TransferFailedError
from engine.models.layers import Tensors
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transfer_key import AsideKey, ProgramKey
from engine.runtime.transport.transport import (
    AnyKey,
    Channel,
    Found,
    Joining,
    Traffic,
    Transport,
    TransportBackend,
    Waiter,
)

_LOOK_EVERY_S = 0.005  # for the end of a cut, while a group cannot form


class LinkCuts:
    """The cut connections of one worker. It stands between the transport and the main thread's place of waiting."""

    def __init__(self, waiter: Waiter):
        self._waiter = waiter
        self.lock = threading.RLock()  # a timer heals
        self.there: set[int] = set()  # members
        self.back: dict[int, int] = {}  # member -> messages received from it before the cut
        self.awaited: int | None = None  # the member from which the main thread takes a message
        self.transport: CuttableTransport | None = None  # of the present group

    def cut(self, peer: int, direction: str, for_ns: int | None = None) -> bool:
        """Cuts the connection to a member ("there", "back" or "both") for a time, or for good with None.

        Returns False if the present group has no such member.
        """
        traffic = self.transport.traffic().get(peer) if self.transport is not None else None
        if traffic is None:
            return False
        with self.lock:
            if direction != "back":
                self.there.add(peer)
            if direction != "there":
                self.back.setdefault(peer, traffic.received)
        if for_ns is not None:
            timer = threading.Timer(for_ns / 1e9, self.heal, (peer,))
            timer.daemon = True
            timer.start()
        return True

    def heal(self, peer: int) -> None:
        """Heals the connection to a member: what was held up comes through; any thread may call it."""
        with self.lock:
            self.there.discard(peer)
            self.back.pop(peer, None)
            if self.transport is not None:
                self.transport.send_kept(peer)
        self.wake()

    def is_cut(self, members: Sequence[int]) -> bool:
        """Returns whether the connection to one of these members is cut, in any direction."""
        return any(each in self.there or each in self.back for each in members)

    def wait_until(self, look: Callable[[], Found | None]) -> Found:
        """Waits as the worker's own waiter does, but finds no message that a cut holds up."""
        return self._waiter.wait_until(lambda: None if self.awaited in self.back else look())

    def wake(self) -> None:
        """Has the main thread look again."""
        self._waiter.wake()


class _CuttableChannel(Generic[AnyKey]):
    """A channel in which messages of cut connections are held up."""

    def __init__(self, inner: Channel[AnyKey], cuts: LinkCuts):
        self._cuts = cuts
        self._inner = inner
        self.post: Callable[[int, AnyKey, Border], None] = inner.post
        self.kept: list[tuple[int, AnyKey, Tensors]] = []

    def has_arrived(self, source: int, key: AnyKey) -> bool:
        """Returns whether `take` would return at once."""
        return source not in self._cuts.back and self._inner.has_arrived(source, key)

    def take_arrived(self, source: int, key: AnyKey) -> Tensors | None:
        """Returns the tensors of a posted message, or None if it has not arrived."""
        return None if source in self._cuts.back else self._inner.take_arrived(source, key)

    def take(self, source: int, key: AnyKey) -> Tensors:
        """Waits for a posted message and returns its tensors."""
        self._cuts.awaited = source
        try:
            return self._inner.take(source, key)
        finally:
            self._cuts.awaited = None

    def send(self, target: int, key: AnyKey, tensors: Tensors) -> None:
        """Starts one message, or keeps it."""
        if target in self._cuts.there:
            with self._cuts.lock:
                if target in self._cuts.there:
                    self.kept.append((target, key, tensors))
                    return
        self._inner.send(target, key, tensors)

    def send_kept(self, target: int) -> None:
        """Starts the messages that were kept for a member."""
        for each in [each for each in self.kept if each[0] == target]:
            self._inner.send(*each)
        self.kept = [each for each in self.kept if each[0] != target]


class CuttableTransport:
    """A transport whose connections can be cut."""

    def __init__(self, inner: Transport, cuts: LinkCuts):
        self._inner = inner
        self._cuts = cuts
        self._in_order = _CuttableChannel[ProgramKey](inner.in_order, cuts)
        self._aside = _CuttableChannel[AsideKey](inner.aside, cuts)
        cuts.transport = self

    @property
    def in_order(self) -> Channel[ProgramKey]:
        """The messages in program order."""
        return self._in_order

    @property
    def aside(self) -> Channel[AsideKey]:
        """The messages aside."""
        return self._aside

    @property
    def epoch(self) -> int:
        """The epoch of the coming messages."""
        return self._inner.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._inner.epoch = epoch

    @property
    def bytes_sent(self) -> int:
        """The bytes of all messages that were begun here, without those that are kept."""
        return self._inner.bytes_sent

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the numbers of messages by member, as this worker sees them."""
        with self._cuts.lock:
            kept = [each[0] for each in (*self._in_order.kept, *self._aside.kept)]
            return {
                peer: each._replace(
                    sent=each.sent + kept.count(peer), received=self._cuts.back.get(peer, each.received)
                )
                for peer, each in self._inner.traffic().items()
            }

    def send_kept(self, peer: int) -> None:
        """Starts the messages that were kept for a member."""
        self._in_order.send_kept(peer)
        self._aside.send_kept(peer)

    def release_sent(self) -> None:
        """Releases the tensors sent in program order, after the commit of their step."""
        self._inner.release_sent()

    def abandon(self) -> None:
        """Breaks off all messages and leaves the group."""
        self._forget()
        self._inner.abandon()

    def close(self) -> None:
        """Leaves the group when no message is under way at any member."""
        self._forget()
        self._inner.close()

    def _forget(self) -> None:
        with self._cuts.lock:
            self._in_order.kept, self._aside.kept = [], []
            if self._cuts.transport is self:
                self._cuts.transport = None


class _CuttableJoining:
    """An attempt to join a group, which does not succeed while a connection to one of its members is cut."""

    def __init__(self, inner: Joining, cuts: LinkCuts, members: Sequence[int]):
        self._inner = inner
        self._cuts = cuts
        self._members = members
        self._is_abandoned = False

    def join(self) -> Transport:
        """Waits until all members have joined."""
        while self._cuts.is_cut(self._members):
            if self._is_abandoned:
                raise TransferFailedError("the group was given up while a connection was cut")
            time.sleep(_LOOK_EVERY_S)
        return CuttableTransport(self._inner.join(), self._cuts)

    def abandon(self) -> None:
        """Ends a `join` in another thread."""
        self._is_abandoned = True
        self._inner.abandon()


class CuttableBackend:
    """A backend whose connections can be cut; the inner one waits in `cuts`."""

    def __init__(self, inner: TransportBackend, cuts: LinkCuts):
        self._inner = inner
        self.cuts = cuts

    def joining(self, epoch: int, members: Sequence[int]) -> Joining:
        """Returns the attempt to join the group of an epoch."""
        return _CuttableJoining(self._inner.joining(epoch, members), self.cuts, members)

    def open_collectives(self, name: str, workers: Sequence[int]) -> None:
        """Makes `workers` torch's process group of this process."""
        self._inner.open_collectives(name, workers)
