"""The transport over links: a group is a number in the frames, and is left by counting on.

A message is there when its bytes are, in memory of its own; they are viewed as tensors when its receive is posted. No
thread waits for a transfer: the main thread reads links in its one wait (`engine/runtime/links/links.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch

from engine.core.errors import TransferFailedError
from engine.core.links.frame import aligned
from engine.models.layers import Tensors
from engine.runtime.device.device import HOST, Device
from engine.runtime.links.links import Arrived, Links
from engine.runtime.links.memory import memory_of, tensor_of
from engine.runtime.transport.group_end import EndChannel, GroupEnd
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transfer_key import AsideKey, ProgramKey
from engine.runtime.transport.transport import AnyKey, LinkFaults


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

    def _begin(self, target: int, key: AnyKey, tensors: Tensors) -> None:
        end = self._end
        end.links.enter(end.number, end)
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
