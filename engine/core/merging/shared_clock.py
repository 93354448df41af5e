"""Times of several hosts on the clock of one of them, each with its uncertainty.

Rules: the bounds that hosts have recorded about each other's clocks are the only source. Between two records both
count, each with the drift since. A host that was never compared with the reference is reached over others, by the way
with the least uncertainty: so a run whose coordinator was replaced still has one clock, that of the first coordinator.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from engine.core.merging.clock_bounds import OffsetBounds


class ClockFact(NamedTuple):
    """Host `by` knew at `at_ns`, by its own clock, that the clock of host `of` less its own lies within the bounds."""

    by: str
    of: str
    at_ns: int
    bounds: OffsetBounds


class SharedTime(NamedTuple):
    """A time on the shared clock: the truth is at most `within_ns` away."""

    at_ns: int
    within_ns: int


class SharedClock:
    """The clock of the host `reference`, for the times of all hosts."""

    def __init__(self, reference: str, facts: Iterable[ClockFact]):
        self.reference = reference
        self._ways: dict[tuple[str, str], list[tuple[int, OffsetBounds]]] = {}  # (from, to): offsets of `to` to `from`
        for by, of, at_ns, bounds in facts:
            self._ways.setdefault((by, of), []).append((at_ns, bounds))
            self._ways.setdefault((of, by), []).append((at_ns + bounds.middle_ns, bounds.reverse))
        for each in self._ways.values():
            each.sort()
        self._next = self._nearest()

    def knows(self, host: str) -> bool:
        """Returns whether times of a host can be told."""
        return host == self.reference or host in self._next

    def at(self, host: str, at_ns: int) -> SharedTime:
        """Returns a time of a host's clock on the shared one; KeyError for a host that it does not know."""
        within_ns = 0
        while host != self.reference:
            bounds = self._bounds(host, self._next[host], at_ns)
            at_ns, within_ns = at_ns + bounds.middle_ns, within_ns + bounds.within_ns
            host = self._next[host]
        return SharedTime(at_ns, within_ns)

    def _bounds(self, host: str, to: str, at_ns: int) -> OffsetBounds:
        """Returns the bounds of the offset of `to` at a time of a host, from the records before and after it."""
        way = self._ways[host, to]
        place = bisect_left(way, at_ns, key=lambda each: each[0])
        near = [bounds.after(at_ns - known_ns) for known_ns, bounds in way[max(0, place - 1) : place + 1]]
        both = OffsetBounds(max(each.least_ns for each in near), min(each.most_ns for each in near))
        if both.least_ns > both.most_ns:  # a clock has jumped between them
            return min(near, key=lambda each: each.within_ns)
        return both

    def _nearest(self) -> dict[str, str]:
        """Returns for each host the next one on its way to the reference, by the least uncertainty of each part."""
        costs = {way: min(bounds.within_ns for _, bounds in known) for way, known in self._ways.items()}
        found: dict[str, str] = {}
        open_ways = [(0, self.reference, self.reference)]
        done: set[str] = set()
        while open_ways:
            cost, host, to = heapq.heappop(open_ways)
            if host in done:
                continue
            done.add(host)
            if host != self.reference:
                found[host] = to
            for (by, of), more in costs.items():
                if of == host and by not in done:
                    heapq.heappush(open_ways, (cost + more, by, host))
        return found
