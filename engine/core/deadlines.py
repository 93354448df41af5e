"""How long another host is waited for: the deadlines follow the round trips of the messages to it.

Rules: a deadline is its base plus so many of the worst round trips lately, and never beyond its limit. Half of the time
by which a word came late counts like a round trip: hosts that are busy look like a slow network. Before enough round
trips are known, the deadline is the usual one, which suits any network of a data centre.
"""

from __future__ import annotations

from typing import NamedTuple

_MS = 1_000_000
_KEPT = 240  # round trips: four a second, of the last minute
_ENOUGH = 20  # of them


class Deadline(NamedTuple):
    """A deadline in nanoseconds: `usual_ns` before round trips are known, then `base_ns` and `factor` of the worst."""

    usual_ns: int
    base_ns: int
    factor: int
    most_ns: int

    def after(self, worst_ns: int | None) -> int:
        """Returns the deadline for the worst round trip lately, None if that is not known."""
        return self.usual_ns if worst_ns is None else min(self.most_ns, self.base_ns + self.factor * worst_ns)

    def more(self, worst_ns: int) -> int:
        """Returns by how much the worst round trip puts off the deadline, and one with a base of its own."""
        return self.after(worst_ns) - self.base_ns


# A host that is silent, which says a word each quarter of a second. A stream that has ended: to be back it takes the
# round trips of TCP, TLS and two greetings. A call that renews a lease, and an attempt at any call to a store: the
# members ask each other, and a first one has to connect, so both are patient until answers have come.
SILENT = Deadline(usual_ns=2_000 * _MS, base_ns=800 * _MS, factor=5, most_ns=10_000 * _MS)
BACK = Deadline(usual_ns=200 * _MS, base_ns=200 * _MS, factor=6, most_ns=3_000 * _MS)
RENEWAL = Deadline(usual_ns=3_000 * _MS, base_ns=700 * _MS, factor=4, most_ns=3_000 * _MS)
ATTEMPT = Deadline(usual_ns=3_000 * _MS, base_ns=1_000 * _MS, factor=4, most_ns=3_000 * _MS)
# What a lease has beyond the time that was asked for: after the end of its leader a store has to elect one, to which
# each member connects anew before it passes a renewal on.
LEASE_MORE = Deadline(usual_ns=0, base_ns=0, factor=12, most_ns=15_000 * _MS)
# From the end of a host until all hear of it; a broken transfer is no proof before.
LATER_NS = BACK.usual_ns + 500 * _MS


class RoundTrips(NamedTuple):
    """The last round trips to a host, in nanoseconds."""

    last_ns: tuple[int, ...] = ()

    def with_one(self, round_trip_ns: int) -> RoundTrips:
        """Returns them with one more."""
        return RoundTrips((*self.last_ns[1 - _KEPT :], max(0, round_trip_ns)))

    @property
    def worst_ns(self) -> int | None:
        """The longest of them; None while too few are known."""
        return max(self.last_ns) if len(self.last_ns) >= _ENOUGH else None

    def differs_from(self, reported_ns: int | None) -> bool:
        """Returns whether the worst one differs enough from the one that was told last: by half, and 10 ms."""
        worst_ns = self.worst_ns
        if worst_ns is None or reported_ns is None:
            return worst_ns is not reported_ns and worst_ns is not None
        return abs(worst_ns - reported_ns) > max(10 * _MS, reported_ns // 2)
