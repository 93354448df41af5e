"""Standstill: all members wait, and some messages between two of them were sent and are not received.

    A: "I have sent B 7 messages"     B: "I expect 6 or more from A, and have 5"     the edge between them is dark

Rules: no edge is judged while a member is inside an action, loads data, is stopped or does not answer: the others may
wait for that member only. Each report of a worker is about one epoch, and about the time since its last piece of news.
A connection that heals within the deadline brings news, and the time begins again.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import NamedTuple

from engine.core.membership.broken_edges import Edge

LEAST_QUIET_NS = 250_000_000  # of a worker that reports
_DARK_NS = 2_000_000_000
_DARK_STEPS = 20
_NUM_STEPS = 10  # of which the median is the usual one, although failures made some of them long


class Counts(NamedTuple):
    """The messages to and from another member since the group was formed."""

    peer: int
    sent: int
    posted: int  # receives that were begun
    received: int


class Report(NamedTuple):
    """What a worker says that waits: for how long it has had no news, and its counts."""

    epoch: int
    quiet_ns: int
    counts: tuple[Counts, ...]


def steps_after(steps_ns: tuple[int, ...], step_ns: int) -> tuple[int, ...]:
    """Returns the durations of the last steps after one more."""
    return (*steps_ns, step_ns)[-_NUM_STEPS:]


def deadline_ns(steps_ns: tuple[int, ...]) -> float:
    """Returns the time after which an edge is dark: two seconds, or twenty usual steps."""
    return max(_DARK_NS, _DARK_STEPS * median(steps_ns)) if steps_ns else _DARK_NS


def dark_edges(reports: Mapping[int, Report | None], epoch: int, least_quiet_ns: float) -> tuple[Edge, ...]:
    """Returns the dark edges, each with the end that waits first; `reports` has all members, None without a report."""
    counts: dict[tuple[int, int], Counts] = {}
    for worker, report in reports.items():
        if report is None or report.epoch != epoch or report.quiet_ns < least_quiet_ns:
            return ()
        counts |= {(worker, each.peer): each for each in report.counts}
    return tuple(
        Edge(worker, peer)
        for (worker, peer), here in counts.items()
        if (there := counts.get((peer, worker))) and min(there.sent, here.posted) > here.received
    )
