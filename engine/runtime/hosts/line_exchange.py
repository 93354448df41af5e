"""Which host ships its records to which: each one to the host that coordinates, and that one to another.

    a host that serves      its own, and the copies that it keeps of hosts that do not coordinate
    the one that coordinates   its own, and the copies of lost hosts, to the first other host that lives

Rules: so the records of each host are on two hosts, as long as there are two, and the host that goes on has all of
them. An answer is about the stream over which it comes: it counts for no shipper of the next one.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from engine.core.hosts.host_messages import KeptHostMessage, ShippedHostMessage
from engine.core.message_codec import Message
from engine.runtime.hosts.away_server import AwayServer
from engine.runtime.hosts.line_keeper import LineKeeper
from engine.runtime.hosts.shipper import Shipper
from engine.runtime.hosts.stream_end import StreamEnd

_LAST_S = 2.0  # from the end of a run until all hosts have shipped their last records
_LOOK_S = 0.01


class ServedLines:
    """The records of a host that does not coordinate, in the folder `run` of host `own`; and copies of others."""

    def __init__(self, own: str, run: Path):
        self._own, self._run, self._chief = own, run, ""
        self._keeper = LineKeeper()
        self._keeper.begin(run)
        self._end: StreamEnd | None = None
        self._shipper: Shipper | None = None

    def follow(self, chief: str, end: StreamEnd) -> None:
        """Ships to host `chief` from now on; nothing if that is this host."""
        self.leave()
        self._chief, self._end = chief, end
        if chief != self._own:
            self._shipper = Shipper(self._own, self._run, end, lambda name: name != chief)
            self._shipper.begin()

    def leave(self) -> None:
        """Ships nothing more over the present stream; returns when no frame of it is being taken, or will be."""
        self.close_shipper()
        if self._end is not None:
            self._end.close()
            self._end.settle()

    def take(self, header: Message, packet: bytes) -> bool:
        """Takes a frame with parts, or an answer; returns whether it is one."""
        shipper, end = self._shipper, self._end
        if isinstance(header, ShippedHostMessage) and end is not None:
            for each in self._keeper.take(header, packet, end.send):
                if shipper is not None:
                    shipper.knows(each.node, each.file, each.begin + each.length)
        elif isinstance(header, KeptHostMessage) and shipper is not None:
            shipper.kept(header)
        return isinstance(header, ShippedHostMessage | KeptHostMessage)

    def finish(self) -> None:
        """Ships the last records."""
        if self._shipper is not None:
            self._shipper.finish(_LAST_S)

    def close_shipper(self) -> None:
        """Ships nothing more."""
        if self._shipper is not None:
            self._shipper.close()
            self._shipper = None

    def close(self) -> None:
        """Ships and keeps nothing more."""
        self.close_shipper()
        self._keeper.close()


class CoordinatorLines:
    """The records of the hosts of a run, on the host `own` that coordinates; `away` has the other ones by name."""

    def __init__(self, own: str, away: Mapping[str, AwayServer]):
        self._own, self._away = own, away
        self._keeper = LineKeeper()
        self._run: Path | None = None
        self._to: AwayServer | None = None
        for each in away.values():
            each.keeper = self._keeper

    def begin(self, run: Path) -> None:
        """Keeps and ships records in the folder of the run from now on."""
        if self._run is None:  # that of the job, not of its twin
            self._run = run
            self._keeper.begin(run)

    def look(self) -> None:
        """Chooses the host that keeps the records of this one, if there is none that lives."""
        if self._run is None or (self._to is not None and not self._to.peer.is_lost):
            return
        self._leave()
        self._to = next((each for each in self._away.values() if self._can_keep(each)), None)
        if self._to is not None:
            self._to.shipper = Shipper(self._own, self._run, self._to.peer.end, self._is_lost)
            self._to.shipper.begin()

    def _can_keep(self, away: AwayServer) -> bool:
        return away.host != self._own and away.has_said.is_set() and not away.peer.is_lost and not away.has_left

    def _is_lost(self, name: str) -> bool:
        return name not in self._away or self._away[name].peer.is_lost

    def finish(self) -> None:
        """Waits until the hosts have shipped their last records."""
        until_s = time.monotonic() + _LAST_S
        for each in self._away.values():
            while self._is_shipping(each) and time.monotonic() < until_s:
                time.sleep(_LOOK_S)
        self.close()

    def close(self) -> None:
        """Ships and keeps nothing more."""
        self._leave()
        self._keeper.close()

    def _is_shipping(self, away: AwayServer) -> bool:
        return self._run is not None and self._can_keep(away) and not away.has_shipped and away.peer.ended_ns is None

    def hand_over(self) -> None:
        """Ships the last records of this host: it leaves."""
        if self._to is not None and self._to.shipper is not None:
            self._to.shipper.finish(_LAST_S)
        self.close()

    def _leave(self) -> None:
        if self._to is not None and self._to.shipper is not None:
            self._to.shipper.close()
            self._to.shipper = None
        self._to = None
