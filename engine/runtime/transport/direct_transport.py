"""The transport over links: a group is a number in the frames, and is left by counting on.

A message is there when its bytes are, in memory of its own; they are viewed as tensors when its receive is posted. No
thread waits for a transfer: the main thread reads links in its one wait (`engine/runtime/transport/links.py`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from typing import Generic, NamedTuple

import torch

from engine.core.errors import TransferFailedError
from engine.core.links import aligned
from engine.models.layers import Tensors
from engine.runtime.device.copies import Arriving, Leaving, ToDevice, tensors_of
from engine.runtime.device.device import HOST, Device, device_trouble
from engine.runtime.device.missing_gradients import look_at, marked_as
from engine.runtime.transport.links import Arrived, Links
from engine.runtime.transport.peer_link import memory_of, tensor_of
from engine.runtime.transport.transport import (
    AnyKey,
    AsideKey,
    Border,
    Channel,
    Issued,
    LinkFaults,
    ProgramKey,
    ProgramPurpose,
    Traffic,
    Transport,
    Waiter,
)

# Cut connections: messages to and from a member of a group can be held up without a sign.
#
#     there   messages to the member are kept, in their order; the sender does not notice
#     back    messages from the member do not arrive, from the cut on
#     join    a group with a member behind a cut does not form
#
# A cut outlives its group. Once it is healed, the kept messages are sent, as if they had been late.


_LOOK_EVERY_S = 0.005  # for the end of a cut, while a group cannot form


class LinkCuts:
    """The cut connections of one worker, with the place where its main thread waits for messages."""

    def __init__(self, waiter: Waiter):
        self.waiter = waiter
        self.there: set[int] = set()  # members
        self.back: dict[int, int] = {}  # member -> messages received from it before the cut
        self._lock = threading.RLock()  # a timer heals
        self._group: Transport | None = None  # the present one
        self._kept: list[tuple[int, Callable[[], None]]] = []  # a member, and the begin of a message to it
        self._met: dict[int, Callable[[str], None]] = {}  # by member, of a cut that has held up no message yet

    def enter(self, group: Transport) -> None:
        """Takes the group whose connections can be cut from now on."""
        with self._lock:
            self._group, self._kept = group, []

    def leave(self, group: Transport) -> None:
        """Forgets a group and the messages that were kept in it."""
        with self._lock:
            if self._group is group:
                self._group, self._kept = None, []

    def cut(
        self, peer: int, direction: str, for_ns: int | None = None, met: Callable[[str], None] = lambda way: None
    ) -> bool:
        """Cuts the connection to a member ("there", "back" or "both") for a time, or for good with None.

        Returns False if the present group has no such member. `met` gets the way of the first message that is held up.
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
        """Heals the connection to a member: the messages that were held up come through; any thread may call it."""
        with self._lock:
            self.there.discard(peer)
            self.back.pop(peer, None)
            self._met.pop(peer, None)
            kept = [begin for target, begin in self._kept if target == peer]
            self._kept = [each for each in self._kept if each[0] != peer]
            for begin in kept:
                begin()
        self.waiter.wake()

    def keeps(self, target: int, begin: Callable[[], None]) -> bool:
        """Keeps the begin of a message to a member behind a cut; returns whether it is kept."""
        with self._lock:
            if target in self.there:
                self._kept.append((target, begin))
                self.holds_up(target, "there")
            return target in self.there

    def holds_up(self, peer: int, way: str) -> None:
        """Tells of the first message that a cut holds up; any thread may call it."""
        with self._lock:
            if (met := self._met.pop(peer, None)) is not None:
                met(way)

    def await_whole(self, members: Iterable[int], is_abandoned: Callable[[], bool]) -> None:
        """Waits until no connection to `members` is cut; raises TransferFailedError once the wait is abandoned."""
        while any(each in self.there or each in self.back for each in members):
            if is_abandoned():
                raise TransferFailedError("the group was given up while a connection was cut")
            time.sleep(_LOOK_EVERY_S)


# The end of one worker in a group, as each backend has it: arrivals, failures, numbers, cuts.
class GroupEnd:
    """The part of a transport that does not depend on the backend; `members` has this worker too.

    Messages lie on the host; `device` takes those that arrive, and gives those that are sent.
    """

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
        """Takes the place of the group before: its connections can be cut from now on."""
        self.cuts.enter(self)

    def expect(self, step: int, issued: Sequence[Issued]) -> None:
        """Does nothing: messages are told apart by their keys."""

    def release_sent(self) -> None:
        """Releases the messages of a committed step."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Breaks off all messages and leaves the group."""
        raise NotImplementedError

    def close(self) -> None:
        """Leaves the group, in which no message is under way."""
        raise NotImplementedError

    def arrives(self, source: int, key: ProgramKey | AsideKey, tensors: Tensors) -> None:
        """Takes in a message whose receive was posted; any thread may call it, and wakes the main thread then."""
        try:
            arriving = self.device.copies.landed(tensors)
            if not self.device.is_host and key.purpose is ProgramPurpose.GRADIENT:
                _look_at(tensors, arriving)
        except RuntimeError as error:  # of the device: this thread is not the one that may end
            self.fails(error)
            return
        with self._counting:
            self.arrived[source, key] = arriving
            self._num_received[source] += 1
        if source in self.cuts.back:
            self.cuts.holds_up(source, "back")

    def fails(self, error: Exception) -> None:
        """Ends every wait for a message by an error; any thread may call it."""
        self.failed = error
        self.cuts.waiter.wake()

    def fails_to(self, target: int, error: Exception) -> None:
        """Ends every wait by the error of a message that could not be sent; any thread may call it.

        An error of this worker's own device says nothing about the other end.
        """
        if not isinstance(error, TransferFailedError) and not device_trouble(error):
            error = TransferFailedError(f"transfer to worker {target} failed: {error}", target)
        self.fails(error)

    def traffic(self) -> Mapping[int, Traffic]:
        """Returns the numbers of messages in both channels by member, as this worker sees them; kept ones are sent."""
        return {
            peer: Traffic(sent, self.num_posted[peer], self.cuts.back.get(peer, self._num_received[peer]))
            for peer, sent in self.num_sent.items()
        }


def _look_at(messages: Tensors, arriving: Arriving) -> None:
    """Marks gradients on their way to the device by a look at the host, for which no action waits."""
    look_at(messages)
    for message, there in zip(messages, arriving.tensors if isinstance(arriving, ToDevice) else arriving, strict=True):
        marked_as(there, message)


class EndChannel(Generic[AnyKey]):
    """The part of a channel that does not depend on the backend."""

    def __init__(self, end: GroupEnd):
        self._of = end

    @property
    def device(self) -> Device:
        """The device on which the tensors of a message lie when they are taken."""
        return self._of.device

    def leaving(self, key: AnyKey, tensors: Leaving) -> Leaving:
        """Begins to bring the tensors of a message to the host, once for all of its targets."""
        return self._of.device.copies.fetched(tensors)

    def has_arrived(self, source: int, key: AnyKey) -> bool:
        """Returns whether `take` would return at once."""
        return (source, key) in self._of.arrived and source not in self._of.cuts.back

    def take_arrived(self, source: int, key: AnyKey) -> Tensors | None:
        """Returns the tensors of a posted message, or None if it has not arrived; never waits, never raises."""
        end = self._of
        arriving = None if source in end.cuts.back else end.arrived.pop((source, key), None)
        return arriving if arriving is None else end.device.copies.admitted(arriving)

    def take(self, source: int, key: AnyKey) -> Tensors:
        """Waits for a posted message and returns its tensors; raises Stopped, or TransferFailedError if it broke."""
        end = self._of

        def look() -> Tensors | None:
            if end.failed is not None and source not in end.cuts.back:
                raise end.failed
            return self.take_arrived(source, key)

        return end.cuts.waiter.wait_until(look)

    def send(self, target: int, key: AnyKey, tensors: Leaving) -> None:
        """Starts one message, or keeps it behind a cut; it must not change before the moment that `Channel` names."""
        end = self._of
        end.num_sent[target] += 1
        if end.device.is_host and target not in end.cuts.there:  # in few calls: the peer may wait
            here: Tensors = tensors  # type: ignore[assignment]  # no copies of a GPU
            end.bytes_sent += sum([each.nbytes for each in here])
            self._begin(target, key, here)
            return
        leaving = end.device.copies.fetched(tensors)
        end.bytes_sent += sum([each.nbytes for each in tensors_of(leaving)])
        if not end.cuts.keeps(target, partial(self._leave_late, target, key, leaving)):
            self._leave(target, key, leaving)

    def _leave(self, target: int, key: AnyKey, leaving: Leaving) -> None:
        end = self._of
        end.device.copies.when_fetched(leaving, partial(self._begin, target, key), partial(end.fails_to, target))

    def _leave_late(self, target: int, key: AnyKey, leaving: Leaving) -> None:
        """Starts a message that a cut has held up, in the thread that heals it: the main thread gets its error."""
        try:
            self._leave(target, key, leaving)
        except TransferFailedError as error:
            self._of.fails(error)

    def _begin(self, target: int, key: AnyKey, tensors: Tensors) -> None:
        raise NotImplementedError


class DirectBackend:
    """The groups of one worker over its links."""

    def __init__(self, cuts: LinkCuts, links: Links, device: Device = HOST):
        self.link_faults = LinkFaults(cuts.cut, links.disturb)
        self._cuts, self._links, self._device = cuts, links, device

    def joining(self, epoch: int, members: Sequence[int], attempt: int = 0) -> DirectJoining:
        """Returns the attempt to join the group of an epoch; with a number it is one in advance."""
        end = DirectTransport(self._cuts, self._links, members, epoch, self._device)
        return DirectJoining(end, in_advance=attempt > 0)


class DirectJoining:
    """One attempt to join a group: no other member is waited for, unless a link is cut."""

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

    def __init__(self, cuts: LinkCuts, links: Links, members: Sequence[int], epoch: int, device: Device):
        super().__init__(cuts, members, epoch, device)
        self.links, self.number = links, epoch
        self.in_order: _DirectChannel[ProgramKey] = _DirectChannel(self, is_aside=0)
        self.aside: _DirectChannel[AsideKey] = _DirectChannel(self, is_aside=1)

    def take_in(self, arrived: Arrived) -> None:
        """Takes in a message whose receive was posted."""
        posted: _Posted = arrived.wanted
        if arrived.room is posted.room:
            self.arrives(arrived.source, posted.key, posted.tensors)
        else:
            self.take_in_late(arrived.source, posted.key, posted.border, arrived.room)

    def take_in_late(self, source: int, key: ProgramKey | AsideKey, border: Border, room: memoryview) -> None:
        """Takes in a message that lies in memory of its own."""
        if len(room) == size_of(border):
            self.arrives(source, key, viewed(room, border))
        else:
            told = f"{key} from worker {source} has {len(room)} bytes, which are not those of its specs"
            self.fails(TransferFailedError(told, source))

    def release_sent(self) -> None:
        """Does nothing: a message that was sent is a copy."""

    def abandon(self) -> None:
        """Drops the messages that are not sent, and leaves the group."""
        self.cuts.leave(self)
        self.links.leave(self)

    def close(self) -> None:
        """Leaves the group, in which no message is under way."""
        self.abandon()


class _Posted(NamedTuple):
    """A receive, and the tensors of its message, which comes straight into their memory."""

    key: ProgramKey | AsideKey
    border: Border
    room: memoryview
    tensors: Tensors


class _DirectChannel(EndChannel[AnyKey]):
    """One of the two channels of an end."""

    def __init__(self, end: DirectTransport, is_aside: int):
        super().__init__(end)
        self._end, self._is_aside = end, is_aside

    def post(self, source: int, key: AnyKey, border: Border) -> None:
        """Posts the receive of one message."""
        end = self._end
        end.links.enter(end.number, end)
        end.num_posted[source] += 1
        number = 2 * key.number + self._is_aside
        if (early := end.links.take_early(source, number)) is not None:
            end.take_in_late(source, key, border, early)
            return
        room = end.links.room_of(size_of(border))
        end.links.post(source, number, _Posted(key, border, room, viewed(room, border)), room)

    def has_arrived(self, source: int, key: AnyKey) -> bool:
        """Returns whether `take` would return at once."""
        if super().has_arrived(source, key):
            return True
        self._end.links.look()
        return super().has_arrived(source, key)

    def send(self, target: int, key: AnyKey, tensors: Leaving) -> None:
        """Starts one message, or keeps it behind a cut; the group is entered here, by the main thread."""
        self._end.links.enter(self._end.number, self._end)
        super().send(target, key, tensors)

    def _begin(self, target: int, key: AnyKey, tensors: Tensors) -> None:
        end = self._end
        parts = [memory_of(each if each.is_contiguous() else each.detach().contiguous()) for each in tensors]
        end.links.send(target, end.number, 2 * key.number + self._is_aside, parts)


def size_of(border: Border) -> int:
    """Returns the bytes of a message with such tensors."""
    return _layout(border)[1]


def _layout(border: Border) -> tuple[list[int], int]:
    """Returns where each tensor of a message begins, and the bytes of all."""
    places, at = [], 0
    for spec in border:
        places.append(aligned(at) if spec.num_bytes else at)
        at = places[-1] + spec.num_bytes
    return places, at


def viewed(room: memoryview, border: Border) -> Tensors:
    """Returns the tensors of a message in its own memory, of shape and dtype as in `border`, of which it has the size.

    Each has a version counter of its own: a change of one in place is none of the others.
    """
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
