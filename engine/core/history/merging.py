"""The records of several hosts of one run as one history, in one order and on one clock."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple, TypeVar

from engine.core.exclusion import Cause
from engine.core.history.process_records import (
    ClockRecord,
    EndedRecord,
    ExitRecord,
    HeardRecord,
    LostRecord,
    StartedRecord,
    TrainingEndedRecord,
)
from engine.core.history.record_lines import decoded, encoded
from engine.core.history.run_records import (
    CommitRecord,
    ConfirmedRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    HeirsRecord,
    JobRecord,
    MarkRecord,
    MovedRecord,
    PlanRecord,
    Record,
    StampedRecord,
    UnreadLine,
    ValidationRecord,
)
from engine.core.job.job import Job
from engine.core.texts import counted, numbered

# The causes of records of a run: an order never stands before its cause.
#
#     exit of a worker ----> epoch that puts it out ----> ends of phases in the epoch ----> plan ----> go
#     fault ----> its confirmation            commit ----> validation of its step
#
# Rules: clocks are known within bounds, so a cause may seem to be later than its effect, by `slack_ns` at most; a
# record that is later still is no cause, but one of the same number after a restart. In one file the order is known.


class Causes:
    """The causes that are still to come, among the records of some files."""

    def __init__(self, files: Sequence[Iterable[StampedRecord]], slack_ns: int):
        self._slack_ns = slack_ns
        self._to_come: dict[Hashable, list[tuple[int, int]]] = {}  # of each cause: time and file, in the file's order
        self._told_ns: dict[Hashable, int] = {}
        for number, file in enumerate(files):
            for record in file:
                for cause in _gives(record):
                    self._to_come.setdefault(cause, []).append((record.at_ns, number))

    def waits(self, record: StampedRecord, file: int) -> bool:
        """Returns whether a cause of a record of a file is still to come in another one."""
        latest_ns = record.at_ns + self._slack_ns
        return any(
            number != file and at_ns <= latest_ns
            for each in _needs(record)
            for at_ns, number in self._to_come.get(each, ())
        )

    def told(self, record: StampedRecord, file: int) -> int:
        """Takes a record as the next one; returns the time of its latest cause if that seems to be later, or 0."""
        latest_ns = record.at_ns + self._slack_ns
        since_ns = max((at for each in _needs(record) if (at := self._told_ns.get(each, 0)) <= latest_ns), default=0)
        for cause in _gives(record):
            self._to_come[cause].remove((record.at_ns, file))
            self._told_ns[cause] = max(record.at_ns, since_ns, self._told_ns.get(cause, 0))
        return since_ns


def _gives(record: StampedRecord) -> Iterator[Hashable]:
    """Yields that which a record is a cause of."""
    match record:
        case ExitRecord(of=of, expected=False):
            yield "exit", of
        case EpochRecord(epoch=epoch):
            yield "epoch", epoch
        case MarkRecord(epoch=epoch, phase=phase):
            yield phase, epoch
        case PlanRecord(epoch=epoch):
            yield "planned", epoch
        case CommitRecord(step=step):
            yield "commit", step
        case FaultRecord(fault=fault):
            yield "fault", fault


def _needs(record: StampedRecord) -> Iterator[Hashable]:
    """Yields the causes of a record."""
    match record:
        case EpochRecord(verdict=verdict):
            for each in verdict:
                if each.cause in (Cause.DEATH, Cause.RAISED):
                    yield "exit", each.worker
        case MarkRecord(epoch=epoch, phase=phase):
            yield "epoch", epoch
            if phase == "plan":
                yield "planned", epoch
        case HeirsRecord(epoch=epoch) | MovedRecord(epoch=epoch):
            yield "epoch", epoch
        case PlanRecord(epoch=epoch):
            yield "epoch", epoch
            yield "inventory", epoch
        case GoRecord(epoch=epoch):
            yield "planned", epoch
        case ValidationRecord(step=step):
            yield "commit", step
        case ConfirmedRecord(fault=fault):
            yield "fault", fault


# The offset between the clocks of two hosts, as bounds that certainly contain it.
#
# Rules:
# - No message arrives before it was sent. So a message from here bounds the offset from above: the other clock at the
#   arrival, less the own clock at the sending. A message to here bounds it from below.
# - Two clocks drift apart by `DRIFT_PPM` at most. A bound grows by that with its age, which counts from the earliest
#   moment that the bound can be of.
# - Bounds come from the messages of a sliding window; the newest one of each direction always counts.
# - Bounds that contradict each other show that a clock has jumped, as after a suspension: the older ones are forgotten.
#
# The offset is the other clock minus the own one. All times are nanoseconds.

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


# Times of several hosts on the clock of one of them, each with its uncertainty.
#
# Rules: the bounds that hosts have recorded about each other's clocks are the only source. Between two records both
# count, each with the drift since. A host that was never compared with the reference is reached over others, by the way
# with the least uncertainty: so a run whose coordinator was replaced still has one clock, that of the first
# coordinator.


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


# The records of several hosts of one run as one history: in one order, on one clock, each decision once.
#
# Rules:
# - The clock is that of the first coordinator; without any record about it, that of the first host. The records of a
#   host
#   without a known clock are left out.
# - Records stand in the order of time: processes of one host write into one file, each a moment after it has taken the
#   time. But none stands before its cause: clocks of hosts are known within bounds, causes for certain. Its time is
#   then
#   that of its cause.
# - A decision is recorded by its host, and by each host that hears of it: a copy counts where the host's own record is
#   missing. It has the time of the decision, or else that of its hearing, if the clock of its host is not known.
# - The job is the first record. The end of the run is told by the host that coordinated last.
# - A host whose record is incomplete is named, with the reason.

_ENDS = (TrainingEndedRecord, EndedRecord)
_HEARING_NS = 1_000_000_000  # at most, from a decision until a host has recorded that it heard of it
_S = 1e9
S = TypeVar("S", bound=StampedRecord)


@dataclass(frozen=True, slots=True)
class HostRecords:
    """The records of a host; `is_cut`: the file ends inside of a line."""

    node: str
    records: Sequence[Record]
    is_cut: bool = False

    @property
    def job(self) -> Job | None:
        """The job as the host has it, without the fields that may be the host's own."""
        first = next((each for each in self.records if isinstance(each, JobRecord)), None)
        return None if first is None else replace(first.job, results="", name="")

    def of(self, kind: type[S]) -> list[S]:
        """Returns the records of a kind."""
        return [each for each in self.records if isinstance(each, kind)]


@dataclass(frozen=True, slots=True)
class MergedHistory:
    """The history of a run; `incomplete` says of some hosts why their records are not whole."""

    reference: str
    records: tuple[Record, ...]
    clock: SharedClock
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def merged(hosts: Sequence[HostRecords]) -> MergedHistory:
    """Returns the records of all hosts as one history; there is one host at least, and all have the same job."""
    clock = SharedClock(_first_coordinator(hosts), [*_facts(hosts)])
    if not any(clock.knows(each.node) for each in hosts):
        clock = SharedClock(hosts[0].node, [*_facts(hosts)])
    known = [each for each in hosts if clock.knows(each.node)]
    last = _last_coordinator(known, clock)
    files = [[*_rising(_own(each, clock, is_last=each.node == last))] for each in known]
    files.append(_heard(known, clock))
    job = next(each for host in (*_first(known, clock.reference), *hosts) for each in host.of(JobRecord))
    slack_ns = 2 * max(map(partial(_within_ns, clock), known), default=0)
    if not all(clock.knows(each.of) for host in known for each in host.of(HeardRecord)):
        slack_ns += _HEARING_NS
    ordered = tuple(_ordered(files, slack_ns))
    return MergedHistory(clock.reference, (job, *ordered), clock, _incomplete(hosts, clock, ordered))


def _first(hosts: Iterable[HostRecords], node: str) -> list[HostRecords]:
    return [each for each in hosts if each.node == node]


def _first_coordinator(hosts: Sequence[HostRecords]) -> str:
    """Returns the host that made the first epoch; of a run without one, the first host."""
    found = [(own.epoch, host.node) for host in hosts for own in host.of(EpochRecord)]
    for host in hosts:
        told = ((each.of, decoded(each.line)) for each in host.of(HeardRecord))
        found += [(record.epoch, of) for of, record in told if isinstance(record, EpochRecord)]
    return min(found, default=(0, hosts[0].node))[1]


def _last_coordinator(hosts: Sequence[HostRecords], clock: SharedClock) -> str:
    """Returns the host that decided last."""
    decided = (
        (clock.at(host.node, each.at_ns).at_ns, host.node)
        for host in hosts
        for each in (*host.of(EpochRecord), *host.of(GoRecord), *host.of(CommitRecord))
    )
    return max(decided, default=(0, hosts[0].node if hosts else ""))[1]


def _facts(hosts: Sequence[HostRecords]) -> Iterator[ClockFact]:
    for host in hosts:
        for each in host.of(ClockRecord):
            yield ClockFact(host.node, each.of, each.at_ns, OffsetBounds(each.least_ns, each.most_ns))


def _own(host: HostRecords, clock: SharedClock, *, is_last: bool) -> Iterator[StampedRecord]:
    """Yields the records that a host has made, in the order of its clock and with times of the shared one."""
    for each in sorted(host.of(StampedRecord), key=attrgetter("at_ns")):
        if isinstance(each, JobRecord | HeardRecord):
            continue
        if isinstance(each, _ENDS) and not is_last:
            continue
        if isinstance(each, ClockRecord):
            other = each.of if host.node == clock.reference else host.node
            if not clock.knows(other):
                continue
            at_ns, within_ns = clock.at(host.node, each.at_ns)
            within_ns = max(within_ns, clock.at(each.of, each.at_ns + (each.least_ns + each.most_ns) // 2).within_ns)
            yield replace(each, at_ns=at_ns, of=other, least_ns=-within_ns, most_ns=within_ns)
        else:
            yield on_clock(each, partial(_at, clock, host.node))


def _rising(records: Iterable[StampedRecord]) -> Iterator[StampedRecord]:
    """Yields records of one host; where the bounds of its clock change, times may seem to go back, and then stay."""
    reached_ns = 0
    for each in records:
        reached_ns = max(reached_ns, each.at_ns)
        yield each if each.at_ns == reached_ns else replace(each, at_ns=reached_ns)


def _heard(hosts: Sequence[HostRecords], clock: SharedClock) -> list[StampedRecord]:
    """Returns the decisions that only hosts have that heard of them, in the order of time."""
    found: dict[tuple[str, str], StampedRecord] = {}
    for host in hosts:
        for each in host.of(HeardRecord):
            record = decoded(each.line)
            if not isinstance(record, StampedRecord):
                continue
            if clock.knows(each.of):
                told = on_clock(record, partial(_at, clock, each.of))
            else:
                told = replace(record, at_ns=_at(clock, host.node, each.at_ns))
            first = found.setdefault((each.of, each.line), told)
            found[each.of, each.line] = min(first, told, key=attrgetter("at_ns"))
    heard_of = {of for of, _ in found}
    for host in hosts:
        for own in host.of(StampedRecord) if host.node in heard_of else ():
            found.pop((host.node, encoded(own)), None)
    return sorted(found.values(), key=attrgetter("at_ns"))


def _at(clock: SharedClock, node: str, at_ns: int) -> int:
    return clock.at(node, at_ns).at_ns


def on_clock(record: S, at: Callable[[int], int]) -> S:
    """Returns a record whose times are on another clock; lengths of time stay."""
    changed = replace(record, at_ns=at(record.at_ns))
    if isinstance(changed, ExitRecord):
        return replace(changed, seen_ns=at(changed.seen_ns))
    if isinstance(changed, EpochRecord):
        verdict = (
            each if each.alive_ns is None else each._replace(alive_ns=at(each.alive_ns)) for each in changed.verdict
        )
        return replace(changed, verdict=tuple(verdict))
    return changed


def _within_ns(clock: SharedClock, host: HostRecords) -> int:
    """Returns how wrong a time of a host can be."""
    return max((clock.at(host.node, each.at_ns).within_ns for each in host.of(StampedRecord)), default=0)


def _ordered(files: Sequence[Sequence[StampedRecord]], slack_ns: int) -> Iterator[StampedRecord]:
    """Yields the records of all files: the earliest first record of a file, unless its cause is still to come."""
    causes = Causes(files, slack_ns)
    places = [0] * len(files)
    while True:
        heads = []
        for number, file in enumerate(files):
            if places[number] < len(file):
                record = file[places[number]]
                heads.append((causes.waits(record, number), record.at_ns, number, record))
        if not heads:
            return
        _, _, number, record = min(heads, key=lambda each: each[:3])
        places[number] += 1
        since_ns = causes.told(record, number)
        yield record if since_ns <= record.at_ns else replace(record, at_ns=since_ns)


def _incomplete(
    hosts: Sequence[HostRecords], clock: SharedClock, ordered: Sequence[StampedRecord]
) -> dict[str, tuple[str, ...]]:
    """Returns the reasons for which the records of hosts are not whole."""
    there = {each.node for each in hosts}
    named = {each.node for host in hosts for each in host.of(StartedRecord)}
    named |= {each.of for host in hosts for each in host.of(ClockRecord)}
    named |= {each.of for host in hosts for each in host.of(HeardRecord)}
    absent = ("no folder of it was given",)
    found: dict[str, tuple[str, ...]] = dict.fromkeys(sorted(named - there - {""}), absent)
    end_ns = max((each.at_ns for each in ordered), default=0)
    for host in hosts:
        if why := tuple(_gaps(host, clock, end_ns)):
            found[host.node] = why
    return found


def _gaps(host: HostRecords, clock: SharedClock, end_ns: int) -> Iterator[str]:
    if not clock.knows(host.node):
        yield "its records are left out: no host has recorded its clock"
    if lines := [each.number for each in host.records if isinstance(each, UnreadLine)]:
        yield f"{numbered('line', lines)} of its events could not be read"
    if host.is_cut:
        yield "its events end inside of a line"
    for each in host.of(LostRecord):
        yield f"worker {each.worker} could not write {counted(each.records, 'record')}: {each.why}"
    if not host.of(EndedRecord) and clock.knows(host.node):
        last_ns = max((clock.at(host.node, each.at_ns).at_ns for each in host.of(StampedRecord)), default=end_ns)
        yield f"its records stop {(end_ns - last_ns) / _S:.3f} s before those of the run, and do not tell its end"
