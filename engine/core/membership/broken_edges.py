"""Broken edges: pairs of workers between which transfers fail, and the order in which their ends are suspected.

Rule: the end of an edge that reports it is suspected after the other end, because a worker that has a fault of its own
breaks transfers of several others. A worker that is no end of a broken edge is never suspected.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple


class Edge(NamedTuple):
    """A pair between which a transfer failed at `worker`; `peer` is `worker` itself if the other end is unknown."""

    worker: int
    peer: int


def ends_of(edges: Collection[Edge]) -> tuple[int, ...]:
    """Returns the ends of all edges, in the order of their numbers."""
    return tuple(sorted({end for edge in edges for end in edge}))


def by_suspicion(edges: Collection[Edge]) -> tuple[int, ...]:
    """Returns the ends, first those with the most edges, then those that others report, then the highest number."""
    others = {end: {other for edge in edges if end in edge for other in edge} for end in ends_of(edges)}
    reports = {end: sum(edge.peer == end != edge.worker for edge in edges) for end in others}
    return tuple(sorted(others, key=lambda end: (len(others[end]), reports[end], end), reverse=True))
