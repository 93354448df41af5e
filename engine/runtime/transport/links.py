"""The links of one worker, each made at first need; they outlive the groups whose messages they carry.

    send to a peer without a link --> LinkWantedMessage --> agent --> LinkMessage to both, with their ends
    a link that comes for a peer that has one: the worker with that number is another one now

Rules: the main thread alone reads, takes in new links and finds that one has ended. Of a GPU another thread sends
behind its copies, and may be the first to need a link. The end of a link is a suspicion: it fails if the present group
awaits a message from that peer, or still has one to send; the agent decides why it ended.
"""

from __future__ import annotations

import os
import queue
import select
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from engine.core.errors import InvariantError, TransferFailedError
from engine.core.links import Arrival, Disturbance, Mailbox
from engine.core.message_codec import ToAgent
from engine.core.messages import LinkMessage, LinkWantedMessage
from engine.runtime.ipc.control import Wakeups
from engine.runtime.transport.host_door import GREET_S, HostDoor
from engine.runtime.transport.link_wire import Met, SocketWire, Wire
from engine.runtime.transport.peer_link import Ends, InRing, Lacks, OutRing, PeerLink, host_room

_NEVER = (0, 0.0)
Arrived = Arrival[Any, memoryview]


class LinkControl(Protocol):
    """The part of a worker's control that links need."""

    wakeups: Wakeups
    given_links: queue.SimpleQueue[tuple[LinkMessage, list[int]]]

    def send(self, message: ToAgent) -> None:
        """Sends a message to the agent."""


class Party(Protocol):
    """The present group, as the links see it."""

    def take_in(self, arrived: Arrived) -> None:
        """Takes in a message whose receive was posted."""

    def fails(self, error: Exception) -> None:
        """Ends every wait for a message by an error."""


class Links:
    """The links of one worker; `room_of` makes the memory of a message that comes."""

    def __init__(
        self,
        control: LinkControl,
        room_of: Callable[[int], memoryview] = host_room,
        address: str = "",
        network: Mapping[str, str] | None = None,
    ):
        """With a `network` the run has several hosts: it has the run's certificate, or nothing for clear text."""
        self._control, self.room_of = control, room_of
        self._address = address
        self._came: queue.SimpleQueue[tuple[LinkMessage, Wire | None]] = queue.SimpleQueue()  # from other hosts
        self._door = None if network is None else HostDoor(address, network, self._comes)
        self._wakeups = control.wakeups
        self._links: dict[int, PeerLink] = {}
        self._making = threading.RLock()  # of links: one that two threads made would keep the message of one of them
        self._main = threading.get_ident()  # makes the links of its worker
        self._mailbox: Mailbox[Any, memoryview] = Mailbox()
        self._party: Party | None = None
        self._told: dict[int, tuple[int, float]] = {}  # peer -> number of its newest link, and when it was told
        self._ended: dict[int, int] = {}  # peer -> number of its newest link that has ended
        self._wakeups.heed(self._adopt_given)

    def enter(self, epoch: int, party: Party) -> None:
        """Makes a group the present one, with its first message.

        Messages with an older number are dropped from then on, and links that have ended are made anew.
        """
        if party is self._party:
            return
        self.look()  # a link whose end has come must not be found broken in the new epoch only
        with self._making:
            for peer, link in [*self._links.items()]:
                number, at_s = self._told.get(peer, _NEVER)
                if link.ends is None and number and time.monotonic() - at_s > GREET_S:
                    self._close(link)  # the other end did not come
                if link.is_broken or (link.ends is None and not number):  # the agent that was asked may be gone
                    del self._links[peer]
                    if link.ends is None and number:  # the other end may still wait for it
                        self._want(peer)
        self._party = party
        self._mailbox.enter(epoch)

    def leave(self, party: Party) -> None:
        """Drops all that a group has not sent yet."""
        if self._party is party:
            self._party = None
            for link in list(self._links.values()):
                link.drop_unsent()

    def take_early(self, source: int, key: int) -> memoryview | None:
        """Returns a message whose receive is not posted, if it is here."""
        self._adopt_given()
        return self._mailbox.take_early(source, key)

    def post(self, source: int, key: int, wanted: object, room: memoryview) -> None:
        """Posts a receive of no early message, with memory for it; raises TransferFailedError if none can come."""
        self._mailbox.post(source, key, wanted, room)
        if (link := self._links.get(source)) is not None and link.is_broken:
            raise _ended("from", source)

    def send(self, target: int, epoch: int, key: int, parts: Sequence[memoryview]) -> None:
        """Begins to send a message, in any thread; raises TransferFailedError if its link has ended."""
        link = self._links.get(target)
        if link is None:
            with self._making:
                link = self._links.get(target) or self._want(target)
        if link.is_broken:
            raise _ended("to", target)
        try:
            lacks = link.send(epoch, key, parts)
        except OSError as error:
            raise _ended("to", target) from error
        if lacks:
            self._see_to(link, lacks)

    def disturb(self, peer: int, disturbance: Disturbance, met: Met) -> bool:
        """Has the link to a worker disturbed from now on, which is told once it meets a frame; False without a link."""
        self._adopt_given()
        link = self._links.get(peer)
        if link is None or link.ends is None or link.is_broken:
            return False
        self._wakeups.forget(link.ends.wire.fileno())
        link.disturb(disturbance, met)
        self._watch(link)
        return True

    def _want(self, peer: int) -> PeerLink:
        """Has the agent make a link."""
        link = self._links[peer] = self._new(peer)
        port = 0 if self._door is None else self._door.port()
        self._control.send(LinkWantedMessage(peer, self._ended.get(peer, 0), self._address, port))
        return link

    def _see_to(self, link: PeerLink, lacks: Lacks) -> None:
        """Has the rest of the messages of a link leave as soon as there is room for it."""
        if threading.get_ident() != self._main:  # which alone watches
            self._wakeups.retry(lambda: self._retry(link))
            self._wakeups.wake()
        elif link.ends is not None and not link.is_broken:
            if lacks == "ring":
                if not link.is_retried:
                    link.is_retried = True
                    self._wakeups.retry(lambda: self._retry(link))
                    self._wakeups.wake()
            elif lacks or link.awaits_room:
                link.awaits_room = lacks == "socket"
                self._watch(link)

    def _retry(self, link: PeerLink) -> bool:
        """Sends the messages that wait for room in the ring; returns whether no more tries are needed."""
        link.is_retried = self._push(link) == "ring"
        return not link.is_retried

    def _push(self, link: PeerLink) -> Lacks:
        try:
            lacks = link.flush()
        except OSError:
            return ""  # its reader finds the end
        if lacks != "ring":
            self._see_to(link, lacks)
        return lacks

    def _watch(self, link: PeerLink) -> None:
        if link.ends is not None:
            fd = link.ends.wire.fileno()
            self._wakeups.watch(fd, partial(self._handle, link), writable=link.awaits_room)

    def _handle(self, link: PeerLink, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._push(link)
        if mask & ~select.EPOLLOUT and not link.is_broken:
            self._read(link)

    def look(self) -> None:
        """Handles all that has come, without a wait."""
        self._wakeups.look()

    def _new(self, peer: int) -> PeerLink:
        return PeerLink(peer, self._mailbox, self._room, self._take_in)

    def _take_in(self, arrived: Arrived) -> None:
        if self._party is not None:
            self._party.take_in(arrived)

    def _room(self, size: int) -> memoryview:
        """Returns memory for a message; raises InvariantError for more than there is: no worker sends so much."""
        try:
            return self.room_of(size)
        except RuntimeError as error:
            raise InvariantError(f"no memory for a message of {size} bytes") from error

    def _comes(self, told: LinkMessage, wire: Wire | None) -> None:
        self._came.put((told, wire))
        self._wakeups.wake()

    def _adopt_given(self) -> None:
        """Takes in the links that the agent has made, and those that have come from other hosts."""
        while not self._control.given_links.empty():
            told, fds = self._control.given_links.get()
            self._told[told.peer] = told.number, time.monotonic()
            if fds:
                self._adopt(told.peer, _near_ends(*fds))
            elif self._door is not None:
                self._door.take(told)
        while not self._came.empty():
            told, wire = self._came.get()
            is_newest = self._told[told.peer][0] == told.number
            if wire is None and is_newest:
                self._lose(told.peer)
            elif wire is not None and is_newest:
                self._adopt(told.peer, Ends(wire))
            elif wire is not None:
                wire.close()

    def _adopt(self, peer: int, ends: Ends) -> None:
        with self._making:
            link = self._links.get(peer)
            if link is None or link.ends is not None:
                if link is not None:
                    is_missed = link.owes
                    self._close(link)
                    self._mailbox.forget(peer)
                    if self._party is not None and is_missed:
                        self._party.fails(_ended("to", peer))
                link = self._links[peer] = self._new(peer)
            link.attach(ends)
        self._watch(link)
        if link.owes and self._push(link) == "ring":
            self._see_to(link, "ring")
        self._read(link)  # TLS may have bytes already that its descriptor does not show

    def _read(self, link: PeerLink) -> None:
        try:
            if link.read():
                return
            error: Exception = _ended("from", link.peer)
        except (InvariantError, ValueError) as wrong:
            error = TransferFailedError(f"the link to worker {link.peer} brings no frames: {wrong}", link.peer)
        self._fail(link, error)

    def _lose(self, peer: int) -> None:
        """Gives up a link to another host that could not begin."""
        with self._making:
            link = self._links.setdefault(peer, self._new(peer))
        if link.ends is None:
            self._fail(link, TransferFailedError(f"worker {peer} cannot be reached", peer))

    def _fail(self, link: PeerLink, error: Exception) -> None:
        is_missed = link.owes or self._mailbox.awaits(link.peer)
        self._close(link)
        if self._party is not None and is_missed:
            self._party.fails(error)

    def _close(self, link: PeerLink) -> None:
        self._ended[link.peer] = self._told.get(link.peer, _NEVER)[0]
        if link.ends is not None and not link.is_broken:
            self._wakeups.forget(link.ends.wire.fileno())
        link.close()

    def close(self) -> None:
        """Closes all links, as the end of the process does."""
        for link in self._links.values():
            self._close(link)
        while not self._control.given_links.empty():
            for fd in self._control.given_links.get()[1]:
                os.close(fd)
        if self._door is not None:
            self._door.close()


def _near_ends(end: int, out: int = -1, back: int = -1) -> Ends:
    """Returns the ends of a link on one host, from their descriptors."""
    wire = SocketWire(socket.socket(fileno=end))
    return Ends(wire) if out < 0 else Ends(wire, OutRing(out), InRing(back))


def _ended(direction: str, peer: int) -> TransferFailedError:
    return TransferFailedError(f"transfer {direction} worker {peer} failed: its link has ended", peer)
