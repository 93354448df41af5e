"""The times of a loss in a run on several hosts, from the records of all hosts on one clock.

Rules: a host knows of a loss when each of its workers that is left was told; the clocks of the hosts are the same. A
commit counts once, when the first host has recorded it. A gap is the time from the last commit before a loss to the
first one after it, less the usual time of a step before.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median

from engine.core.errors import ensure
from engine.core.history.process_records import ClockRecord, KnownRecord
from engine.core.history.record import Record
from engine.core.history.run_records import CommitRecord

Hosts = Mapping[str, Sequence[Record]]  # name -> the records of the host


def known_s(hosts: Hosts, lost: Iterable[int], at_ns: int, gone: Iterable[str] = ()) -> float:
    """Returns the time from a loss at `at_ns` until all workers of each host knew of it; `gone` hosts are lost too.

    Of several `lost` workers, which are lost together, the first one counts of which a worker was told.
    """
    victims, told_ns = frozenset(lost), 0
    for name, records in hosts.items():
        if name in {*gone}:
            continue
        first_ns: dict[int, int] = {}
        for each in records:
            if isinstance(each, KnownRecord) and each.of in victims and each.at_ns >= at_ns:
                first_ns.setdefault(each.worker, each.at_ns)
        ensure(bool(first_ns), f"no worker of host {name} was told of the loss")
        told_ns = max(told_ns, *first_ns.values())
    return (told_ns - at_ns) / 1e9


def commits_ns(hosts: Hosts) -> list[int]:
    """Returns the times of the commits of a run, each step once, in order."""
    found: dict[int, int] = {}
    for records in hosts.values():
        for each in records:
            if isinstance(each, CommitRecord):
                found[each.step] = min(each.at_ns, found.get(each.step, each.at_ns))
    return [found[step] for step in sorted(found)]


def gap_s(found_ns: Sequence[int], at_ns: int) -> float:
    """Returns the gap of a loss at `at_ns`, of a run with these commits."""
    before = [each for each in found_ns if each <= at_ns]
    after = [each for each in found_ns if each > at_ns]
    ensure(len(before) > 1 and bool(after), "there are commits before a loss and after it")
    return (after[0] - before[-1] - usual_ns(before)) / 1e9


def usual_ns(found_ns: Sequence[int]) -> float:
    """Returns the median time from one commit to the next."""
    return median(later - earlier for earlier, later in pairwise(found_ns))


def clock_widths_ms(hosts: Hosts, ahead_ns: Mapping[str, int]) -> tuple[list[float], int]:
    """Returns the widths of all bounds of clocks, and how many do not contain the offset.

    `ahead_ns` is how far the clock of each host is ahead of a common one.
    """
    widths, outside = [], 0
    for name, records in hosts.items():
        for each in records:
            if isinstance(each, ClockRecord):
                offset_ns = ahead_ns[each.of] - ahead_ns[name]
                widths.append((each.most_ns - each.least_ns) / 1e6)
                outside += not each.least_ns <= offset_ns <= each.most_ns
    return widths, outside
