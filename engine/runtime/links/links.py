"""The links of one worker, each made at first need; they outlive the groups, whose messages go over them.

    send to a peer without a link --> LinkWantedMessage --> agent --> LinkMessage to both, with their ends
    a link that comes for a peer that has one: the worker with that number is another one now

Rules: the main thread alone reads, takes in new links and finds that one has ended. The end of a link is a suspicion: it
fails what the present group awaits from that peer, or still has to send; the agent decides why it ended.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from engine.core.errors import InvariantError, TransferFailedError
from engine.core.links.arrivals import Arrival, Mailbox
from engine.core.process_messages import LinkWantedMessage
from engine.runtime.ipc.control import Control
from engine.runtime.links.peer_link import Ends, Lacks, PeerLink, host_room
from engine.runtime.links.ring import InRing, OutRing
from engine.runtime.transport.tensor_spec import Border
from engine.runtime.transport.transfer_key import AsideKey, ProgramKey

Wanted = tuple[ProgramKey | AsideKey, Border]
Arrived = Arrival[Wanted, Tensor]


class Party(Protocol):
    """The present group, as the links see it."""

    def take_in(self, arrived: Arrived) -> None:
        """Takes in a message whose receive was posted."""

    def fails(self, error: Exception) -> None:
        """Ends every wait for a message by an error."""


class Links:
    """The links of one worker; `room_of` makes the memory of a message that comes."""

    def __init__(self, control: Control, room_of: Callable[[int], Tensor] = host_room):
        self._control, self._room_of = control, room_of
        self._wakeups = control.wakeups
        self._links: dict[int, PeerLink] = {}
        self._mailbox: Mailbox[Wanted, Tensor] = Mailbox()
        self._party: Party | None = None
        self._numbers: dict[int, int] = {}  # of the newest link, by peer
        self._wakeups.heed(self._adopt_given)

    def enter(self, epoch: int, party: Party) -> None:
        """Makes a group the present one, with its first receive: what comes with an older number is dropped from then on,
        and links that have ended are made anew.
        """
        if party is self._party:
            return
        self._links = {peer: link for peer, link in self._links.items() if not link.is_broken}
        self._party = party
        self._mailbox.enter(epoch)

    def leave(self, party: Party) -> None:
        """Drops all that a group has not sent yet."""
        if self._party is party:
            self._party = None
            for link in list(self._links.values()):
                link.drop_unsent()

    def post(self, source: int, key: int, wanted: Wanted) -> Arrived | None:
        """Posts a receive; returns its message if that is here. Raises TransferFailedError if none can come."""
        self._adopt_given()
        arrived = self._mailbox.post(source, key, wanted)
        if arrived is None and (link := self._links.get(source)) is not None and link.is_broken:
            raise _ended("from", source)
        return arrived

    def send(self, target: int, epoch: int, key: int, parts: Sequence[Tensor]) -> None:
        """Begins to send a message; raises TransferFailedError if its link has ended."""
        link = self._links.get(target)
        if link is None:
            link = self._links[target] = self._new(target)
            self._control.send(LinkWantedMessage(target, self._numbers.get(target, 0)))
        if link.is_broken:
            raise _ended("to", target)
        try:
            self._see_to(link, link.send(epoch, key, parts))
        except OSError as error:
            raise _ended("to", target) from error

    def _see_to(self, link: PeerLink, lacks: Lacks) -> None:
        """Has the rest of what a link sends leave as soon as there is room for it."""
        if link.ends is not None and not link.is_broken:
            if lacks == "ring":
                self._wakeups.retry(lambda: self._push(link) != "ring")
                self._wakeups.wake()
            elif lacks or link.awaits_room:
                link.awaits_room = lacks == "socket"
                self._watch(link)

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
            fd = link.ends.socket.fileno()
            self._wakeups.watch(fd, lambda mask: self._handle(link, mask), writable=link.awaits_room)

    def _handle(self, link: PeerLink, mask: int) -> None:
        if mask & select.EPOLLOUT:
            self._push(link)
        if mask & ~select.EPOLLOUT and not link.is_broken:
            self._read(link)

    def look(self) -> None:
        """Handles what has come, without a wait."""
        self._wakeups.look()

    def _new(self, peer: int) -> PeerLink:
        def take_in(epoch: int, key: int, whole: Tensor) -> None:
            arrived = self._mailbox.put(peer, key, epoch, whole)
            if arrived is not None and self._party is not None:
                self._party.take_in(arrived)

        return PeerLink(peer, lambda: self._mailbox.epoch, self._room_of, take_in)

    def _adopt_given(self) -> None:
        """Takes in the links that the agent has made."""
        while not self._control.given_links.empty():
            message, (end, out, back) = self._control.given_links.get()
            peer = message.peer
            self._numbers[peer] = message.number
            link = self._links.get(peer)
            if link is None or link.ends is not None:
                if link is not None:
                    self._close(link)
                    self._mailbox.forget(peer)
                link = self._links[peer] = self._new(peer)
            link.attach(Ends(socket.socket(fileno=end), OutRing(out), InRing(back)))
            self._watch(link)
            if link.owes and self._push(link) == "ring":
                self._see_to(link, "ring")

    def _read(self, link: PeerLink) -> None:
        try:
            if link.read():
                return
            error: Exception = _ended("from", link.peer)
        except (InvariantError, ValueError) as wrong:
            error = TransferFailedError(f"the link to worker {link.peer} brings no frames: {wrong}", link.peer)
        is_missed = link.owes or self._mailbox.awaits(link.peer)
        self._close(link)
        if self._party is not None and is_missed:
            self._party.fails(error)

    def _close(self, link: PeerLink) -> None:
        if link.ends is not None and not link.is_broken:
            self._wakeups.forget(link.ends.socket.fileno())
        link.close()

    def close(self) -> None:
        """Closes all links, as the end of the process does."""
        for link in self._links.values():
            self._close(link)


def _ended(direction: str, peer: int) -> TransferFailedError:
    return TransferFailedError(f"transfer {direction} worker {peer} failed: its link has ended", peer)
