"""Faulty links of a simulated network: what becomes of each message that reaches a link. Pure: no clock, no payloads.

    silent      nothing comes through; after the fault all of it does, in order, as TCP sends it again
    late        each message takes longer
    reset       the message is lost, and both ends see a broken link
    duplicated  each message comes twice
    middle      the first message that the fault meets comes in part, then the link is silent

A fault is about one direction; two of them cut a link both ways. Without an end (`until` is None) it lasts for good.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["silent", "late", "reset", "duplicated", "middle"]
KINDS: tuple[Kind, ...] = ("silent", "late", "reset", "duplicated", "middle")
Way = tuple[int, int]  # from worker to worker


class LinkFault(NamedTuple):
    """A fault of one direction of a link, from its moment on."""

    kind: Kind
    until: int | None = None  # the first moment without it
    later: int = 0  # of `late`: the additional time of a message


class Fate(NamedTuple):
    """One thing that comes of a message: at a moment, all of it, the first part of it, or a broken link."""

    at: int
    what: Literal["whole", "part", "broken"]


class FaultyLinks:
    """The links between workers. Messages of one way never overtake each other."""

    def __init__(self) -> None:
        self._faults: dict[Way, LinkFault] = {}
        self._last: dict[Way, int] = {}  # when the latest message comes through
        self._in_part: set[Way] = set()  # ways on which the fault has met its first message

    def strike(self, way: Way, fault: LinkFault) -> None:
        """Begins a fault of one way, in place of an earlier one."""
        self._faults[way] = fault
        self._in_part.discard(way)

    def heal(self, way: Way) -> None:
        """Ends the fault of a way for the messages that come."""
        self._faults.pop(way, None)

    def are_cut(self, now: int, members: tuple[int, ...]) -> bool:
        """Returns whether no group of these members can form now."""
        silent = (way for way in self._faults if (fault := self.fault(now, way)) and fault.kind in ("silent", "middle"))
        return any(one in members and other in members for one, other in silent)

    def fault(self, now: int, way: Way) -> LinkFault | None:
        """Returns the fault of a way now."""
        fault = self._faults.get(way)
        return None if fault is None or (fault.until is not None and now >= fault.until) else fault

    def fates(self, now: int, way: Way) -> tuple[Fate, ...]:
        """Returns what comes of a message that reaches its link now; nothing if it is lost without a sign."""
        fault = self.fault(now, way)
        if fault is None:
            return (self._whole(now, way),)
        match fault.kind:
            case "late":
                return (self._whole(now + fault.later, way),)
            case "duplicated":
                return (self._whole(now, way), self._whole(now, way))
            case "reset":
                return (Fate(now, "broken"),)
        part = () if fault.kind == "silent" or way in self._in_part else (Fate(now, "part"),)
        self._in_part.add(way)
        return part if fault.until is None else (*part, self._whole(fault.until, way))

    def _whole(self, at: int, way: Way) -> Fate:
        self._last[way] = at = max(at, self._last.get(way, at))
        return Fate(at, "whole")
