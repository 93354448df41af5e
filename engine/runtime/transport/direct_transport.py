"""The transport over links: a group is a number in the frames, so leaving it needs no messages.

A message has arrived when all of its bytes are in memory of its own, which the posted receive views as tensors. No
thread waits for a transfer: the main thread reads links in its one wait (`engine/runtime/transport/links.py`).

With variable shapes, a value between stages begins with the sizes of its tensors, as int64 numbers. Its receive is
posted without memory: the frame of the message has its length, and the message gets memory of its own.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache, lru_cache, partial
from itertools import islice
from operator import attrgetter
from typing import Generic, NamedTuple

import torch

from engine.core.errors import TransferFailedError
from engine.core.links import ASIDE, IN_ORDER, STATE, aligned, key_of
from engine.models.layers import Tensors
from engine.runtime.device.copies import Arriving, Leaving, ToDevice, tensors_of
from engine.runtime.device.device import HOST, Device, device_trouble
from engine.runtime.device.missing_gradients import look_at, marked_as
from engine.runtime.transport.links import Links
from engine.runtime.transport.peer_link import memory_of, tensor_of
from engine.runtime.transport.transport import (
    AnyKey,
    AsideKey,
    AsidePurpose,
    Border,
    Channel,
    Issued,
    LinkFaults,
    ProgramKey,
    ProgramPurpose,
    TensorSpec,
    Traffic,
    Waiter,
)

# Cut connections: messages to and from a member of a group are held back silently.
#
#     there   messages to the member are queued in order; the sender does not notice
#     back    messages from the member stop arriving
#     join    a group with a member behind a cut does not form
#
# A cut outlives its group. Once it is healed, the queued messages are sent, as if they were merely late.


_POLL_S = 0.005  # for the end of a cut, while a group cannot form


class LinkCuts:
    """The cut connections of one worker; its main thread waits in `waiter`."""

    def __init__(self, waiter: Waiter):
        self.waiter = waiter
        self.there: set[int] = set()  # members
        self.back: dict[int, int] = {}  # member -> messages received from it before the cut
        self._lock = threading.RLock()  # a timer heals
        self._group: GroupEnd | None = None  # the current one
        self._pending: list[tuple[int, Callable[[], None]]] = []  # (member, function that starts a message to it)
        self._met: dict[int, Callable[[str], None]] = {}  # by member: cuts that have not held back a message yet

    def enter(self, group: GroupEnd) -> None:
        """Sets the group whose connections can be cut from now on."""
        with self._lock:
            self._group, self._pending = group, []

    def leave(self, group: GroupEnd) -> None:
        """Forgets a group and its queued messages."""
        with self._lock:
            if self._group is group:
                self._group, self._pending = None, []

    def cut(
        self, peer: int, direction: str, for_ns: int | None = None, met: Callable[[str], None] = lambda way: None
    ) -> bool:
        """Cuts the connection to a member ("there", "back" or "both") for a time, or None until it is healed.

        Returns False if the current group has no such member; `met` gets the direction of the first message held back.
        """
        with self._lock:
            traffic = self._group.traffic().get(peer) if self._group is not None else None
            if traffic is None:
                return False
            self._met[peer] = met
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
        """Heals the connection to a member and releases its messages; any thread may call it."""
        with self._lock:
            self.there.discard(peer)
            self.back.pop(peer, None)
            self._met.pop(peer, None)
            released = [begin for target, begin in self._pending if target == peer]
            self._pending = [message for message in self._pending if message[0] != peer]
            for begin in released:
                begin()
        self.waiter.wake()

    def keeps(self, target: int, begin: Callable[[], None]) -> bool:
        """Queues a message if its target is behind a cut; returns whether it did."""
        with self._lock:
            if target in self.there:
                self._pending.append((target, begin))
                self.holds_up(target, "there")
            return target in self.there

    def holds_up(self, peer: int, way: str) -> None:
        """Reports the first message that a cut holds back; any thread may call it."""
        with self._lock:
            if (met := self._met.pop(peer, None)) is not None:
                met(way)

    def await_whole(self, members: Iterable[int], is_abandoned: Callable[[], bool]) -> None:
        """Waits until no connection to `members` is cut; raises TransferFailedError once the wait is abandoned."""
        while any(member in self.there or member in self.back for member in members):
            if is_abandoned():
                raise TransferFailedError("the group was given up while a connection was cut")
            time.sleep(_POLL_S)


class GroupEnd:
    """What all backends share: arrivals, failures, counts, cuts; messages are on the host, tensors on `device`."""

    in_order: Channel[ProgramKey]
    aside: Channel[AsideKey]

    def __init__(self, cuts: LinkCuts, members: Iterable[int], epoch: int, device: Device):
        self.cuts = cuts
        self.device = device
        self.epoch = epoch
        self.bytes_sent = 0
        self.failed: Exception | None = None
        self.arrived: dict[tuple[int, ProgramKey | AsideKey], Arriving] = {}
        self.num_sent = dict.fromkeys(members, 0)
        self.num_posted = self.num_sent.copy()
        self._num_received = self.num_sent.copy()
        self._counting = threading.Lock()  # messages arrive in several threads

    def begin(self) -> None:
        """Replaces the previous group: connections of this one can be cut from now on."""
        self.cuts.enter(self)

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        """Does nothing: messages are distinguished by their keys."""

    def arrives(self, source: int, key: ProgramKey | AsideKey, tensors: Tensors) -> None:
        """Accepts a message whose receive was posted; any thread may call it, and then wakes the main thread."""
        try:
            arriving: Arriving = tensors if self.device.is_host else self._landed(key, tensors)
        except RuntimeError as error:  # of the device: this thread must not end the worker
            self.fails(error)
            return
        with self._counting:
            self.arrived[source, key] = arriving
            self._num_received[source] += 1
        if source in self.cuts.back:
            self.cuts.holds_up(source, "back")

    def _landed(self, key: ProgramKey | AsideKey, tensors: Tensors) -> Arriving:
        arriving = self.device.copies.landed(tensors)
        if key.purpose is ProgramPurpose.GRADIENT:
            look_at(tensors)  # while they are on the host: no action waits for it
            on_device = arriving.tensors if isinstance(arriving, ToDevice) else arriving
            for message, there in zip(tensors, on_device, strict=True):
                marked_as(there, message)
        return arriving

    def fails(self, error: Exception) -> None:
        """Ends every wait for a message with an error; any thread may call it."""
        self.failed = error
        self.cuts.waiter.wake()

    def fails_to(self, target: int, error: Exception) -> None:
        """Ends every wait, from any thread, with the error of a failed send; an error of this device blames no peer."""
        if not isinstance(error, TransferFailedError) and not device_trouble(error):
            error = TransferFailedError(f"transfer to worker {target} failed: {error}", target)
        self.fails(error)

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the message counts of both channels by member, as this worker sees them; held-back ones are sent."""
        return {
            peer: Traffic(sent, self.num_posted[peer], self.cuts.back.get(peer, self._num_received[peer]))
            for peer, sent in self.num_sent.items()
        }


class EndChannel(Generic[AnyKey]):
    """The part of a channel that every backend shares."""

    def __init__(self, end: GroupEnd):
        self._of = end

    @property
    def device(self) -> Device:
        """The device on which received tensors are."""
        return self._of.device

    def leaving(self, key: AnyKey, tensors: Leaving) -> Leaving:
        """Starts copying the tensors of a message to the host, once for all of its targets."""
        return self._of.device.copies.fetched(tensors)

    def has_arrived(self, source: int, key: AnyKey) -> bool:
        """Returns whether `take` would return at once."""
        return (source, key) in self._of.arrived and source not in self._of.cuts.back

    def take_arrived(self, source: int, key: AnyKey) -> Tensors | None:
        """Returns the tensors of a posted message, or None if it has not arrived; never waits, never raises."""
        end = self._of
        arriving = None if source in end.cuts.back else end.arrived.pop((source, key), None)
        if arriving is None or end.device.is_host:
            return arriving  # type: ignore[return-value]  # no copies on a GPU
        return end.device.copies.admitted(arriving)

    def take(self, source: int, key: AnyKey) -> Tensors:
        """Waits for a posted message and returns its tensors; raises Stopped, or TransferFailedError if it broke."""
        end = self._of

        def look() -> Tensors | None:
            if end.failed is not None and source not in end.cuts.back:
                raise end.failed
            return self.take_arrived(source, key)

        return end.cuts.waiter.wait_until(look)


class DirectBackend:
    """The groups of one worker over its links."""

    def __init__(self, cuts: LinkCuts, links: Links, device: Device = HOST, *, carries_sizes: bool = False):
        self.link_faults = LinkFaults(cuts.cut, links.disturb)
        self._cuts, self._links, self._device, self._carries_sizes = cuts, links, device, carries_sizes

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> DirectJoining:
        """Returns an attempt to join the group of an epoch, in advance if it is numbered."""
        end = DirectTransport(self._cuts, self._links, members, epoch, self._device, carries_sizes=self._carries_sizes)
        return DirectJoining(end, in_advance=attempt > 0)


class DirectJoining:
    """One attempt to join a group; it waits for no other member, unless a connection is cut."""

    @property
    def may_wait(self) -> bool:
        """Whether a connection to a member is cut."""
        cuts = self._end.cuts
        return not self._end.num_sent.keys().isdisjoint({*cuts.there, *cuts.back})

    def __init__(self, end: DirectTransport, *, in_advance: bool = False):
        self._end, self._in_advance = end, in_advance
        self._is_abandoned = False

    def join(self) -> DirectTransport:
        """Returns the transport; raises TransferFailedError after `abandon`."""
        end = self._end
        end.cuts.await_whole(end.num_sent, lambda: self._is_abandoned)
        if not self._in_advance:
            end.begin()
        return end

    def abandon(self) -> None:
        """Ends a `join` in another thread."""
        self._is_abandoned = True


class DirectTransport(GroupEnd):
    """The messages of one worker in the group of an epoch."""

    def __init__(
        self,
        cuts: LinkCuts,
        links: Links,
        members: Sequence[int],
        epoch: int,
        device: Device,
        *,
        carries_sizes: bool = False,
    ):
        super().__init__(cuts, members, epoch, device)
        self.links, self.number, self.carries_sizes = links, epoch, carries_sizes
        self.in_order: _DirectChannel[ProgramKey] = _DirectChannel(self, IN_ORDER)
        self.aside: _DirectChannel[AsideKey] = _DirectChannel(self, ASIDE)

    def rates(self) -> Mapping[int, int]:
        """Returns the bytes a second of links to workers of other hosts, as far as they are known."""
        return self.links.rates()

    def take_in(self, source: int, key: ProgramKey | AsideKey, border: Border, room: memoryview) -> None:
        """Accepts a message that is in memory of its own."""
        is_open = any(spec.is_open for spec in border)
        border = border_in(room, border) if is_open else border
        if len(room) == size_of(border):
            self.arrives(source, key, viewed(room, border)[is_open:])  # without the sizes
        else:
            reason = f"{key} from worker {source} has {len(room)} bytes, which are not those of its specs"
            self.fails(TransferFailedError(reason, source))

    def release_sent(self) -> None:
        """Does nothing: sent messages are copies."""

    def abandon(self) -> None:
        """Drops unsent messages and leaves the group."""
        self.cuts.leave(self)
        self.links.leave(self)

    def close(self) -> None:
        """Leaves the group; no message is in flight."""
        self.abandon()


class _PostedReceive(NamedTuple):
    """A receive, and the tensors that its message is read into."""

    end: DirectTransport
    key: ProgramKey | AsideKey
    border: Border
    room: memoryview
    tensors: Tensors

    def arrives(self, source: int, room: memoryview) -> None:
        """Accepts its message, which is in this memory."""
        if room is self.room:
            self.end.arrives(source, self.key, self.tensors)
        else:
            self.end.take_in(source, self.key, self.border, room)


class _DirectChannel(EndChannel[AnyKey]):
    def __init__(self, end: DirectTransport, lane: int):
        super().__init__(end)
        self._end, self._lane = end, lane

    def _number(self, key: AnyKey) -> int:
        return key_of(key.number, STATE if key.purpose is AsidePurpose.HEAL else self._lane)

    def post(self, source: int, key: AnyKey, border: Border) -> None:
        end = self._end
        end.links.enter(end.number, end)
        end.num_posted[source] += 1
        number = self._number(key)
        if (early := end.links.take_early(source, number)) is not None:
            end.take_in(source, key, border, early)
            return
        size = _known_size(border)
        if size is None:
            end.links.post(source, number, _PostedReceive(end, key, border, _UNKNOWN, ()), _UNKNOWN)
            return
        room = end.links.room_of(size)
        end.links.post(source, number, _PostedReceive(end, key, border, room, viewed(room, border)), room)

    def has_arrived(self, source: int, key: AnyKey) -> bool:
        if super().has_arrived(source, key):
            return True
        self._end.links.look()
        return super().has_arrived(source, key)

    def send(self, target: int, key: AnyKey, tensors: Leaving) -> None:
        """Starts one message, or queues it behind a cut; `Channel` says how long its tensors must not change."""
        end = self._end
        if end.links.party is not end:  # or there is nothing to enter: one call less
            end.links.enter(end.number, end)
        end.num_sent[target] += 1
        if end.device.is_host and target not in end.cuts.there:  # the fast path: the peer may be waiting
            here: Tensors = tensors  # type: ignore[assignment]  # not copies from a GPU
            self._begin(target, key, here)
            end.bytes_sent += sum(map(_NBYTES, here))
            return
        leaving = end.device.copies.fetched(tensors)
        end.bytes_sent += sum([tensor.nbytes for tensor in tensors_of(leaving)])
        if not end.cuts.keeps(target, partial(self._leave_late, target, key, leaving)):
            self._leave(target, key, leaving)

    def _leave(self, target: int, key: AnyKey, leaving: Leaving) -> None:
        end = self._end
        end.device.copies.when_fetched(leaving, partial(self._begin, target, key), partial(end.fails_to, target))

    def _leave_late(self, target: int, key: AnyKey, leaving: Leaving) -> None:
        """Starts a message that a cut held back, in the thread that heals it: the main thread gets the error."""
        try:
            self._leave(target, key, leaving)
        except TransferFailedError as error:
            self._end.fails(error)

    def _begin(self, target: int, key: AnyKey, tensors: Tensors) -> None:
        end = self._end
        if end.carries_sizes and tensors and key.purpose in _BETWEEN_STAGES:
            sizes = [size for tensor in tensors for size in tensor.shape]
            tensors = (torch.tensor(sizes, dtype=torch.int64, device="cpu"), *tensors)
        parts = []
        for tensor in tensors:  # a comprehension would be one more call
            parts.append(memory_of(tensor if tensor.is_contiguous() else tensor.detach().contiguous()))
        end.links.send(target, end.number, self._number(key), parts)


_NBYTES = attrgetter("nbytes")
_BETWEEN_STAGES = (ProgramPurpose.ACTIVATION, ProgramPurpose.GRADIENT, AsidePurpose.VALIDATION)
_UNKNOWN = memoryview(b"")  # the memory of a receive whose message tells its sizes


def border_in(room: memoryview, border: Border) -> Border:
    """Returns the border of a message that begins with its sizes; impossible sizes give one of another length."""
    sizes = TensorSpec((sum(len(spec.shape) for spec in border),), torch.int64, needs_grad=False)
    numbers = iter(room[: sizes.num_bytes].cast("q") if len(room) >= sizes.num_bytes else ())
    shapes = (tuple(islice(numbers, len(spec.shape))) for spec in border)
    return (sizes, *(replace(spec, shape=shape) for spec, shape in zip(border, shapes, strict=True)))


@lru_cache(maxsize=1024)  # it is asked for at every receive
def _known_size(border: Border) -> int | None:
    """Returns the size of a message with such tensors, in bytes; None if it tells their sizes itself."""
    return None if any(spec.is_open for spec in border) else size_of(border)


def size_of(border: Border) -> int:
    """Returns the size of a message with such tensors, in bytes."""
    return _layout(border)[1]


def _layout(border: Border) -> tuple[list[int], int]:
    places, at = [], 0
    for spec in border:
        places.append(aligned(at) if spec.num_bytes else at)
        at = places[-1] + spec.num_bytes
    return places, at


def viewed(room: memoryview, border: Border) -> Tensors:
    """Returns the tensors of `border` as views of their message's memory, each with its own version counter."""
    whole = tensor_of(room)
    if len(border) == 1:
        (spec,) = border
        return (whole.view(spec.dtype).view(spec.shape),)
    storage = whole.untyped_storage()
    return tuple(
        torch.empty(0, dtype=spec.dtype, device="cpu").set_(
            storage, place // spec.dtype.itemsize, spec.shape, _strides(spec.shape)
        )
        for spec, place in zip(border, _layout(border)[0], strict=True)
    )


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
