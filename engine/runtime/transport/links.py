"""The links of one worker, each created on first use; they outlive the groups whose messages they carry.

    send to a peer without a link --> LinkWantedMessage --> agent --> LinkMessage to both, with their ends
    a second link to the same peer: the worker with that number has been replaced

Rules: only the main thread reads, adopts new links and notices a closed one. With a GPU, another thread sends after the
copies, and may be the first to need a link. A closed link is a suspicion: it is a failure if the current group expects
a message from that peer or still has one to send. The agent decides why it closed.
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
from typing import Protocol

from engine.core.errors import InvariantError, TransferFailedError
from engine.core.links import Disturbance, Mailbox
from engine.core.messages import LinkMessage, LinkWantedMessage
from engine.runtime.process.control import Control
from engine.runtime.transport.host_door import GREET_S, HostDoor
from engine.runtime.transport.link_wire import Met, Wire
from engine.runtime.transport.peer_link import Ends, InRing, Lacks, OutRing, PeerLink, PostedReceive, host_room

_NEVER = (0, 0.0)


class Party(Protocol):
    """The current group, as the links see it."""

    def fails(self, error: Exception) -> None:
        """Ends every wait for a message with an error."""


class Links:
    """The links of one worker; `room_of` allocates the memory of incoming messages."""

    def __init__(
        self,
        control: Control,
        room_of: Callable[[int], memoryview] = host_room,
        address: str = "",
        network: Mapping[str, str] | None = None,
    ):
        """`network` is given if the run has several hosts: the run's certificate, or empty for clear text."""
        self._control, self.room_of = control, room_of
        self._address = address
        self._came: queue.SimpleQueue[tuple[LinkMessage, Wire | None]] = queue.SimpleQueue()  # links to other hosts
        self._door = None if network is None else HostDoor(address, network, self._comes)
        self._wakeups = control.wakeups
        self._links: dict[int, PeerLink] = {}
        self._making = threading.RLock()  # if two threads created the same link, one would lose its message
        self._main = threading.get_ident()
        self._mailbox: Mailbox[PostedReceive, memoryview] = Mailbox()
        self.party: Party | None = None  # the current group
        self._newest: dict[int, tuple[int, float]] = {}  # peer -> number of its newest link, and when it was announced
        self._ended: dict[int, int] = {}  # peer -> number of its newest closed link
        self._wakeups.heed(self._adopt_given)

    def enter(self, epoch: int, party: Party) -> None:
        """Makes a group the current one, at its first message.

        From then on, messages of older groups are dropped, and closed links are replaced.
        """
        if party is self.party:
            return
        self.look()  # a link that is already closed must not be noticed in the new epoch only
        with self._making:
            for peer, link in [*self._links.items()]:
                number, at_s = self._newest.get(peer, _NEVER)
                if link.ends is None and number and time.monotonic() - at_s > GREET_S:
                    self._close(link)  # the other end never connected
                if link.is_broken or (link.ends is None and not number):  # the agent we asked may be gone
                    del self._links[peer]
                    if link.ends is None and number:  # the other end may still be waiting
                        self._want(peer)
        self.party = party
        self._mailbox.enter(epoch)

    def leave(self, party: Party) -> None:
        """Drops everything that a group has not sent yet."""
        if self.party is party:
            self.party = None
            self._mailbox.leave()
            for link in list(self._links.values()):
                link.drop_unsent()

    def take_early(self, source: int, key: int) -> memoryview | None:
        """Returns a message that arrived before its receive was posted, if there is one."""
        self._adopt_given()
        return self._mailbox.take_early(source, key)

    def post(self, source: int, key: int, receive: PostedReceive, room: memoryview) -> None:
        """Posts a receive with memory for its message; raises TransferFailedError if the link is closed."""
        self._mailbox.post(source, key, receive, room)
        if (link := self._links.get(source)) is not None and link.is_broken:
            raise _ended("from", source)

    def send(self, target: int, epoch: int, key: int, parts: Sequence[memoryview]) -> None:
        """Starts to send a message, in any thread; raises TransferFailedError if its link is closed."""
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

    def rates(self) -> dict[int, int]:
        """Returns the bytes a second of links to other hosts, by peer, as far as they are known."""
        links = [(peer, link.ends) for peer, link in self._links.items() if not link.is_broken]
        rates = {peer: ends.wire.bytes_per_s for peer, ends in links if ends is not None}
        return {peer: rate for peer, rate in rates.items() if rate}

    def disturb(self, peer: int, disturbance: Disturbance, met: Met) -> bool:
        """Disturbs the link to a worker from now on; calls `met` at the first frame. Returns False without a link."""
        self._adopt_given()
        link = self._links.get(peer)
        if link is None or link.ends is None or link.is_broken:
            return False
        self._wakeups.forget(link.ends.wire.fileno())
        link.disturb(disturbance, met)
        self._watch(link)
        return True

    def _want(self, peer: int) -> PeerLink:
        link = self._links[peer] = self._new(peer)
        port = 0 if self._door is None else self._door.port()
        self._control.send(LinkWantedMessage(peer, self._ended.get(peer, 0), self._address, port))
        return link

    def _see_to(self, link: PeerLink, lacks: Lacks) -> None:
        """Arranges for a link's queued messages to be sent as soon as there is room."""
        if threading.get_ident() != self._main:  # the only one that watches
            self._wakeups.retry(lambda: self._retry(link))
            self._wakeups.wake()
        elif link.ends is not None and not link.is_broken:
            if lacks == "ring" and not link.is_retried:
                link.is_retried = True
                self._wakeups.retry(lambda: self._retry(link))
                self._wakeups.wake()
            if link.awaits_room != (lacks == "socket"):
                link.awaits_room = lacks == "socket"
                self._watch(link)

    def _retry(self, link: PeerLink) -> bool:
        """Sends the messages that wait for room in the ring; returns whether all are sent."""
        link.is_retried = self._push(link) == "ring"
        return not link.is_retried

    def _push(self, link: PeerLink) -> Lacks:
        try:
            lacks = link.flush()
        except OSError:
            return ""  # the reader will notice
        self._see_to(link, lacks)
        return lacks

    def _watch(self, link: PeerLink) -> None:
        if link.ends is not None:
            fd = link.ends.wire.fileno()
            handle = self._handle if link.awaits_room else self._read
            self._wakeups.watch(fd, partial(handle, link), writable=link.awaits_room)

    def _handle(self, link: PeerLink, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._push(link)
        if mask & ~select.EPOLLOUT and not link.is_broken:
            self._read(link)

    def look(self) -> None:
        """Handles everything that has arrived, without blocking."""
        self._wakeups.look()

    def _new(self, peer: int) -> PeerLink:
        return PeerLink(peer, self._mailbox, self._room)

    def _room(self, size: int) -> memoryview:
        """Returns memory for a message; raises InvariantError if there is too little: no worker sends that much."""
        try:
            return self.room_of(size)
        except RuntimeError as error:
            raise InvariantError(f"no memory for a message of {size} bytes") from error

    def _comes(self, message: LinkMessage, wire: Wire | None) -> None:
        self._came.put((message, wire))
        self._wakeups.wake()

    def _adopt_given(self) -> None:
        """Adopts the links that the agent has created, and those from other hosts."""
        while not self._control.given_links.empty():
            message, fds = self._control.given_links.get()
            self._newest[message.peer] = message.number, time.monotonic()
            if fds:
                self._adopt(message.peer, _near_ends(*fds))
            elif self._door is not None:
                self._door.take(message)
        while not self._came.empty():
            message, wire = self._came.get()
            is_newest = self._newest[message.peer][0] == message.number
            if wire is None and is_newest:
                self._lose(message.peer)
            elif wire is not None and is_newest:
                self._adopt(message.peer, Ends(wire))
            elif wire is not None:
                wire.close()

    def _adopt(self, peer: int, ends: Ends) -> None:
        with self._making:
            link = self._links.get(peer)
            if link is None or link.ends is not None:
                if link is not None:  # its peer has closed it, and may not have read what was sent
                    is_missed = link.owes or link.sent_in == self._mailbox.epoch
                    self._close(link)
                    self._mailbox.forget(peer)
                    if self.party is not None and is_missed:
                        self.party.fails(_ended("to", peer))
                link = self._links[peer] = self._new(peer)
            link.attach(ends)
        self._watch(link)
        if link.owes:
            self._push(link)
        self._read(link)  # TLS may have buffered bytes already, which its descriptor does not show

    def _read(self, link: PeerLink, mask: int = 0) -> None:
        try:
            if link.read():
                return
            error: Exception = _ended("from", link.peer)
        except (InvariantError, ValueError) as wrong:
            error = TransferFailedError(f"the link to worker {link.peer} brings no frames: {wrong}", link.peer)
        self._fail(link, error)

    def _lose(self, peer: int) -> None:
        """Gives up a link to another host that could not be established."""
        with self._making:
            link = self._links.setdefault(peer, self._new(peer))
        if link.ends is None:
            self._fail(link, TransferFailedError(f"worker {peer} cannot be reached", peer))

    def _fail(self, link: PeerLink, error: Exception) -> None:
        is_missed = link.owes or self._mailbox.awaits(link.peer)
        self._close(link)
        if self.party is not None and is_missed:
            self.party.fails(error)

    def _close(self, link: PeerLink) -> None:
        self._ended[link.peer] = self._newest.get(link.peer, _NEVER)[0]
        if link.ends is not None and not link.is_broken:
            self._wakeups.forget(link.ends.wire.fileno())
        link.close()

    def close(self) -> None:
        """Closes all links, as the end of the process would."""
        for link in self._links.values():
            self._close(link)
        while not self._control.given_links.empty():
            for fd in self._control.given_links.get()[1]:
                os.close(fd)
        if self._door is not None:
            self._door.close()


def _near_ends(end: int, out: int = -1, back: int = -1) -> Ends:
    wire = Wire(socket.socket(fileno=end))
    return Ends(wire) if out < 0 else Ends(wire, OutRing(out), InRing(back))


def _ended(direction: str, peer: int) -> TransferFailedError:
    return TransferFailedError(f"transfer {direction} worker {peer} failed: its link has ended", peer)
