"""The offset between the clocks of two hosts, as bounds that certainly contain it.

Rules:
- No message arrives before it was sent. So a message from here bounds the offset from above: the other clock at the
  arrival, less the own clock at the sending. A message to here bounds it from below.
- Two clocks drift apart by `DRIFT_PPM` at most. A bound grows by that with its age, which counts from the earliest
  moment that the bound can be of.
- Bounds come from the messages of a sliding window; the newest one of each direction always counts.
- Bounds that contradict each other show that a clock has jumped, as after a suspension: the older ones are forgotten.

The offset is the other clock minus the own one. All times are nanoseconds.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

DRIFT_PPM = 200
WINDOW_NS = 10_000_000_000
_MILLION = 1_000_000


class OffsetBounds(NamedTuple):
    """The offset of a clock is one of these, the first and the last included."""

    least_ns: int
    most_ns: int

    @property
    def middle_ns(self) -> int:
        """The offset that is the least wrong."""
        return (self.least_ns + self.most_ns) // 2

    @property
    def within_ns(self) -> int:
        """How wrong the middle can be."""
        return -((self.least_ns - self.most_ns) // 2)

    @property
    def reverse(self) -> OffsetBounds:
        """The offset as the other host sees it."""
        return OffsetBounds(-self.most_ns, -self.least_ns)

    def after(self, age_ns: int) -> OffsetBounds:
        """Returns the bounds that hold so long after, or before, the time of these."""
        drift_ns = drifted_ns(age_ns)
        return OffsetBounds(self.least_ns - drift_ns, self.most_ns + drift_ns)


def drifted_ns(age_ns: int) -> int:
    """Returns by how much two clocks drift apart at most in a time, rounded up."""
    return -(-abs(age_ns) * DRIFT_PPM // _MILLION)


class OffsetWatch:
    """Learns the offset of another host's clock from the messages between the two hosts."""

    def __init__(self) -> None:
        self._above = _LeastBound()  # of the offset
        self._below = _LeastBound()  # of the offset with the other sign

    def sent(self, sent_ns: int, arrived_ns: int) -> None:
        """Learns from a message from here, sent at a time of the own clock, which arrived at one of the other clock."""
        self._above.add(arrived_ns - sent_ns, sent_ns)
        if self._contradicts(sent_ns):
            self._below = _LeastBound()

    def received(self, sent_ns: int, arrived_ns: int) -> None:
        """Learns from a message to here, sent at a time of the other clock, which arrived at one of the own clock."""
        self._below.add(arrived_ns - sent_ns, arrived_ns)
        if self._contradicts(arrived_ns):
            self._above = _LeastBound()

    def _contradicts(self, now_ns: int) -> bool:
        bounds = self.at(now_ns)
        return bounds is not None and bounds.least_ns > bounds.most_ns

    def at(self, now_ns: int) -> OffsetBounds | None:
        """Returns the bounds at a time of the own clock; None until messages have come both ways."""
        above_ns, below_ns = self._above.at(now_ns), self._below.at(now_ns)
        return None if above_ns is None or below_ns is None else OffsetBounds(-below_ns, above_ns)


class _LeastBound:
    """The least of some upper bounds, each of which grows with its age, over a sliding window.

    A bound without its growth since time 0 is a number that does not change, so bounds can be compared once: one that
    is not less than a newer one never counts again.
    """

    def __init__(self) -> None:
        self._bounds: deque[tuple[int, int]] = deque()  # (time, bound less its growth in millionths): rising numbers

    def add(self, bound_ns: int, at_ns: int) -> None:
        number = bound_ns * _MILLION - DRIFT_PPM * at_ns
        while self._bounds and self._bounds[-1][1] >= number:
            self._bounds.pop()
        self._bounds.append((at_ns, number))
        while self._bounds[0][0] < at_ns - WINDOW_NS:
            self._bounds.popleft()

    def at(self, now_ns: int) -> int | None:
        if not self._bounds:
            return None
        at_ns, number = self._bounds[0]
        return -(-(number + DRIFT_PPM * max(now_ns, at_ns)) // _MILLION)
