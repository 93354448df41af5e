"""The end of one worker in a group, as each backend has it: arrivals, failures, numbers, cuts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Generic

from engine.core.errors import TransferFailedError
from engine.models.layers import Tensors
from engine.runtime.device.copies import Arriving, Leaving, ToDevice, tensors_of
from engine.runtime.device.device import Device
from engine.runtime.device.device_errors import device_trouble
from engine.runtime.device.missing_gradients import look_at, marked_as
from engine.runtime.transport.link_cuts import LinkCuts
from engine.runtime.transport.transfer_key import AsideKey, Issued, ProgramKey, ProgramPurpose
from engine.runtime.transport.transport import AnyKey, Channel, Traffic


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
