"""The transport over links: a group is a number in the frames, and is left by counting on.

A message is there when its bytes are, in memory of its own; they are viewed as tensors when its receive is posted. No
thread waits for a transfer: the main thread reads links in its one wait (`engine/runtime/links/links.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from engine.core.errors import TransferFailedError, ensure
from engine.core.links.frame import aligned
from engine.models.layers import Tensors
from engine.runtime.device.copies import Leaving
from engine.runtime.device.device import HOST, Device
from engine.runtime.links.links import Arrived, Links
from engine.runtime.transport.group_end import EndChannel, GroupEnd
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.tensor_spec import Border, bytes_of
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
        key, border = arrived.wanted
        tensors = viewed(arrived.room, border)
        if tensors is None:
            told = f"{key} from worker {arrived.source} has {len(arrived.room)} bytes, which are not those of its specs"
            self.fails(TransferFailedError(told, arrived.source))
        else:
            self.arrives(arrived.source, key, tensors)

    def release_sent(self) -> None:
        """Does nothing: a message that was sent is a copy."""

    def abandon(self) -> None:
        """Drops the messages that are not sent, and leaves the group."""
        self.cuts.leave(self)
        self.links.leave(self)

    def close(self) -> None:
        """Leaves the group, in which no message is under way."""
        self.abandon()


class _DirectChannel(EndChannel[AnyKey]):
    """One of the two channels of an end."""

    def __init__(self, end: DirectTransport, is_aside: int):
        super().__init__(end)
        self._end, self._is_aside = end, is_aside

    def post(self, source: int, key: AnyKey, border: Border) -> None:
        """Posts the receive of one message."""
        end = self._end
        end.links.enter(end.number, end)
        arrived = end.links.post(source, 2 * key.number + self._is_aside, (key, border))
        end.num_posted[source] += 1
        if arrived is not None:
            end.take_in(arrived)

    def send(self, target: int, key: AnyKey, tensors: Leaving) -> None:
        """Starts one message, of which the transport has a copy, or keeps the tensors until it leaves."""
        self._end.links.enter(self._end.number, self._end)
        super().send(target, key, tensors)

    def has_arrived(self, source: int, key: AnyKey) -> bool:
        """Returns whether `take` would return at once."""
        if super().has_arrived(source, key):
            return True
        self._end.links.look()
        return super().has_arrived(source, key)

    def _begin(self, target: int, key: AnyKey, tensors: Tensors) -> None:
        parts = [bytes_of(each.detach().contiguous()) for each in tensors]
        self._end.links.send(target, self._end.number, 2 * key.number + self._is_aside, parts)


def viewed(room: Tensor, border: Border) -> Tensors | None:
    """Returns the tensors of a message in its own memory, of shape and dtype as in `border`; None if it has others.

    Each has a version counter of its own: a change of one in place is none of the others.
    """
    if len(border) == 1:
        (spec,) = border
        return (room.view(spec.dtype).view(spec.shape),) if room.numel() == spec.num_bytes else None
    places, at = [], 0
    for spec in border:
        places.append(aligned(at) if spec.num_bytes else at)
        at = places[-1] + spec.num_bytes
    if at != room.numel():
        return None
    ensure(room.device.type == "cpu", "messages come to memory of the host")
    storage = room.untyped_storage()
    return tuple(
        torch.empty(0, dtype=spec.dtype, device="cpu").set_(
            storage, place // spec.dtype.itemsize, spec.shape, _strides(spec.shape)
        )
        for spec, place in zip(border, places, strict=True)
    )


@cache
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()
