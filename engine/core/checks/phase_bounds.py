"""How wrong the time of a phase can be, where its two ends are of different hosts.

Rules: the two ends of a phase may be times of two hosts, each known within the bounds of its clock; then both count. If
one host has told both, its clock is one. A time that no worker has told is the coordinator's, whose clock is the
shared one. A run on one host has no record of clocks, and no uncertainty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.core.history.process_records import ClockRecord, HostRecord, StartedRecord
from engine.core.history.record import AGENT
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord
from engine.core.merging.clock_bounds import OffsetBounds

HostTime = Callable[[int, int], tuple[str, int]]  # worker, time -> its host, how wrong the time can be


def host_times(history: RunHistory) -> HostTime | None:
    """Returns the host of a worker and the uncertainty of a time of it; None of a run on one host."""
    clocks: dict[str, list[ClockRecord]] = {}
    for each in history.of(ClockRecord):
        clocks.setdefault(each.of, []).append(each)
    if not clocks:
        return None
    nodes = {each.of: each.node for each in history.of(StartedRecord)}
    # Every other host has a record of its clock; the first record of a host may be of any of them.
    reference = next((each.node for each in history.of(HostRecord) if each.node not in clocks), "")

    def found(worker: int, at_ns: int) -> tuple[str, int]:
        node = nodes.get(worker, reference)
        known = (OffsetBounds(each.least_ns, each.most_ns).after(at_ns - each.at_ns) for each in clocks.get(node, ()))
        return node, min((each.within_ns for each in known), default=0)

    return found


def uncertain_phases(
    points_ns: Mapping[str, int],
    begin_ns: int,
    commit: CommitRecord | None,
    tellers: Mapping[int, int],
    times: HostTime | None,
) -> dict[str, int]:
    """Returns the uncertainty of each phase that ends on another host than it begins, and of *merged*.

    `points_ns` has the end of each phase, and `tellers` the worker that each time is of.
    """
    if times is None:
        return {}
    ends = sorted((at_ns, phase) for phase, at_ns in points_ns.items())
    found, reached_ns = {}, begin_ns
    if commit is not None and "replay" in points_ns:
        ends.append((commit.at_ns, "merged"))
    for at_ns, phase in ends:
        (before, one_ns), (after, two_ns) = (times(tellers.get(each, AGENT), each) for each in (reached_ns, at_ns))
        if before != after:
            found[phase] = one_ns + two_ns
        reached_ns = max(reached_ns, at_ns)
    return found
