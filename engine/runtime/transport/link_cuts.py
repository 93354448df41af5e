"""Cut connections: messages to and from a member of a group can be held up without a sign.

    there   messages to the member are kept, in their order; the sender does not notice
    back    messages from the member do not arrive, from the cut on
    join    a group with a member behind a cut does not form

A cut outlives its group. Once it is healed, the kept messages are sent, as if they had been late.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from engine.core.errors import TransferFailedError
from engine.runtime.transport.transport import Transport, Waiter

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
