"""The records of several hosts of one run as one history, in one order and on one clock."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter, itemgetter
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
    on_clock,
)
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
    StoppedEarlyRecord,
    UnreadLine,
    ValidationRecord,
)
from engine.core.job.job import Job
from engine.core.texts import numbered

# The causes of records: no record precedes its cause.
#
#     exit of a worker ----> epoch that puts it out ----> ends of phases in the epoch ----> plan ----> go
#     fault ----> its confirmation            commit ----> validation of its step
#
# Rules: clocks are known within bounds, so a cause may seem up to `slack_ns` later than its effect. A record that is
# later still is not the cause: it has the same number, but comes after a restart. Within one file the order is known.


class Causes:
    """The causes that are still to come in the records of some files."""

    def __init__(self, files: Sequence[Iterable[StampedRecord]], slack_ns: int):
        self._slack_ns = slack_ns
        self._to_come: dict[Hashable, list[tuple[int, int]]] = {}  # of each cause: time and file, in the file's order
        self._past_ns: dict[Hashable, int] = {}
        for number, file in enumerate(files):
            for record in file:
                for cause in _provides(record):
                    self._to_come.setdefault(cause, []).append((record.at_ns, number))

    def waits(self, record: StampedRecord, file: int) -> bool:
        """Returns whether a cause of a record of a file is still to come in another one."""
        latest_ns = record.at_ns + self._slack_ns
        return any(
            number != file and at_ns <= latest_ns
            for cause in _requires(record)
            for at_ns, number in self._to_come.get(cause, ())
        )

    def take(self, record: StampedRecord, file: int) -> int:
        """Takes the next record; returns the time of its latest cause within the slack, or 0."""
        latest_ns = record.at_ns + self._slack_ns
        times_ns = (self._past_ns.get(cause, 0) for cause in _requires(record))
        since_ns = max((at_ns for at_ns in times_ns if at_ns <= latest_ns), default=0)
        for cause in _provides(record):
            self._to_come[cause].remove((record.at_ns, file))
            self._past_ns[cause] = max(record.at_ns, since_ns, self._past_ns.get(cause, 0))
        return since_ns


def _provides(record: StampedRecord) -> Iterator[Hashable]:
    """Yields the causes of other records that a record is."""
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


def _requires(record: StampedRecord) -> Iterator[Hashable]:
    match record:
        case EpochRecord(verdict=verdict):
            yield from (("exit", out.worker) for out in verdict if out.cause in (Cause.DEATH, Cause.RAISED))
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
        case ValidationRecord(step=step) | StoppedEarlyRecord(step=step):
            yield "commit", step
        case ConfirmedRecord(fault=fault):
            yield "fault", fault


# The offset between the clocks of two hosts, as bounds that are certain to contain it.
#
# Rules:
# - No message arrives before it was sent. So an outgoing message bounds the offset from above: the other clock at
#   arrival minus our clock at sending. An incoming message bounds it from below.
# - Two clocks drift apart by at most `DRIFT_PPM`. A bound widens by that with its age, which counts from the earliest
#   moment to which the bound can belong.
# - Bounds come from the messages in a sliding window; the newest one in each direction always counts.
# - Contradictory bounds show that a clock has jumped, as after a suspend: the older ones are dropped.
#
# The offset is the other clock minus our own. All times are nanoseconds.

DRIFT_PPM = 200
WINDOW_NS = 10_000_000_000
_MILLION = 1_000_000


class OffsetBounds(NamedTuple):
    """The offset of a clock lies between these, both inclusive."""

    least_ns: int
    most_ns: int

    @property
    def middle_ns(self) -> int:
        """The best estimate of the offset."""
        return (self.least_ns + self.most_ns) // 2

    @property
    def within_ns(self) -> int:
        """The largest error of the middle."""
        return -((self.least_ns - self.most_ns) // 2)

    @property
    def reverse(self) -> OffsetBounds:
        """The offset as the other host sees it."""
        return OffsetBounds(-self.most_ns, -self.least_ns)

    def after(self, age_ns: int) -> OffsetBounds:
        """Returns the bounds that hold this long after, or before, the time of these."""
        drift_ns = drifted_ns(age_ns)
        return OffsetBounds(self.least_ns - drift_ns, self.most_ns + drift_ns)


def drifted_ns(age_ns: int) -> int:
    """Returns the most that two clocks drift apart in this time, rounded up."""
    return -(-abs(age_ns) * DRIFT_PPM // _MILLION)


class OffsetWatch:
    """Learns the offset of another host's clock from the messages between the two hosts."""

    def __init__(self) -> None:
        self._above = _LeastBound()  # of the offset
        self._below = _LeastBound()  # of the offset with the other sign

    def sent(self, sent_ns: int, arrived_ns: int) -> None:
        """Learns from an outgoing message, sent at a time of our clock, which arrived at a time of the other clock."""
        self._above.add(arrived_ns - sent_ns, sent_ns)
        if self._contradicts(sent_ns):
            self._below = _LeastBound()

    def received(self, sent_ns: int, arrived_ns: int) -> None:
        """Learns from an incoming message, sent at a time of the other clock, which arrived at a time of ours."""
        self._below.add(arrived_ns - sent_ns, arrived_ns)
        if self._contradicts(arrived_ns):
            self._above = _LeastBound()

    def _contradicts(self, now_ns: int) -> bool:
        bounds = self.at(now_ns)
        return bounds is not None and bounds.least_ns > bounds.most_ns

    def at(self, now_ns: int) -> OffsetBounds | None:
        """Returns the bounds at a time of our clock; None until messages have gone both ways."""
        above_ns, below_ns = self._above.at(now_ns), self._below.at(now_ns)
        return None if above_ns is None or below_ns is None else OffsetBounds(-below_ns, above_ns)


class _LeastBound:
    """The least of some upper bounds, each of which widens with its age, over a sliding window.

    A bound minus its growth since time 0 is constant, so two bounds need one comparison: one that is not less than a
    newer one never counts again.
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
# Rules: the only source is the bounds that hosts have recorded about each other's clocks. Between two records both
# count, each with the drift since. A host that was never compared with the reference is reached over others, by the
# path with the least uncertainty: so a run whose coordinator was replaced still has one clock, that of the first one.


class ClockFact(NamedTuple):
    """Host `by` knew at `at_ns`, by its own clock, that the clock of host `of` minus its own lies within the bounds."""

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
        for way in self._ways.values():
            way.sort()
        self._next = self._nearest()

    def knows(self, host: str) -> bool:
        """Returns whether times of a host can be converted."""
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
        place = bisect_left(way, at_ns, key=itemgetter(0))
        near = [bounds.after(at_ns - known_ns) for known_ns, bounds in way[max(0, place - 1) : place + 1]]
        both = OffsetBounds(max(bounds.least_ns for bounds in near), min(bounds.most_ns for bounds in near))
        if both.least_ns > both.most_ns:  # a clock has jumped between them
            return min(near, key=attrgetter("within_ns"))
        return both

    def _nearest(self) -> dict[str, str]:
        """Returns the next host on each host's path to the reference, by the least uncertainty of each hop."""
        costs = {way: min(bounds.within_ns for _, bounds in known) for way, known in self._ways.items()}
        nearest: dict[str, str] = {}
        open_ways = [(0, self.reference, self.reference)]
        done: set[str] = set()
        while open_ways:
            cost, host, to = heapq.heappop(open_ways)
            if host in done:
                continue
            done.add(host)
            if host != self.reference:
                nearest[host] = to
            for (by, of), more in costs.items():
                if of == host and by not in done:
                    heapq.heappush(open_ways, (cost + more, by, host))
        return nearest


# The records of several hosts of one run as one history: in one order, on one clock, each decision once.
#
# Rules:
# - The clock is that of the first coordinator; if no record mentions it, that of the first host. Records of a host
#   whose clock is unknown are left out.
# - Records are in order of time, because the processes of a host write to one file, each slightly after taking the
#   time. But no record precedes its cause: clocks are known within bounds, causes for certain. It then gets the time of
#   its cause.
# - A decision is recorded by its host and copied by each host that hears of it: a copy counts where the host's own
#   record is missing. It has the time of the decision or, if the clock of its host is unknown, the time of the copy.
# - The job is the first record. The end of the run comes from the host that coordinated last.
# - A host whose records are incomplete is named, with the reason.

_ENDS = (TrainingEndedRecord, EndedRecord)
_HEARING_NS = 1_000_000_000  # the longest time from a decision until another host has recorded its copy
_S = 1e9
S = TypeVar("S", bound=StampedRecord)
ReadLine = Callable[[str], Record]  # the codec of records


@dataclass(frozen=True, slots=True)
class HostRecords:
    """The records of a host; `is_cut`: the file ends inside a line."""

    node: str
    records: Sequence[Record]
    is_cut: bool = False

    @property
    def job(self) -> Job | None:
        """The job as the host has it, without the fields in which hosts may differ."""
        first = next((record for record in self.records if isinstance(record, JobRecord)), None)
        return None if first is None else replace(first.job, results="", name="")

    def of(self, kind: type[S]) -> list[S]:
        """Returns the records of a kind."""
        return [each for each in self.records if isinstance(each, kind)]


@dataclass(frozen=True, slots=True)
class MergedHistory:
    """The history of a run; `incomplete` has the reasons why the records of some hosts are not whole."""

    reference: str
    records: tuple[Record, ...]
    clock: SharedClock
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def merged(hosts: Sequence[HostRecords], read: ReadLine) -> MergedHistory:
    """Returns the records of all hosts as one history; there is at least one host, and all have the same job."""
    facts = [
        ClockFact(host.node, clock.of, clock.at_ns, OffsetBounds(clock.least_ns, clock.most_ns))
        for host in hosts
        for clock in host.of(ClockRecord)
    ]
    clock = SharedClock(_first_coordinator(hosts, read), facts)
    if not any(clock.knows(host.node) for host in hosts):
        clock = SharedClock(hosts[0].node, facts)
    on_clock = [host for host in hosts if clock.knows(host.node)]
    last = _last_coordinator(on_clock, clock)
    files = [[*_rising(_own(host, clock, is_last=host.node == last))] for host in on_clock]
    files.append(_copies(on_clock, clock, read))
    reference_first = sorted(hosts, key=lambda host: host.node != clock.reference)
    job = next(job for host in reference_first for job in host.of(JobRecord))
    stamps = ((host.node, record.at_ns) for host in on_clock for record in host.of(StampedRecord))
    slack_ns = 2 * max((clock.at(*stamp).within_ns for stamp in stamps), default=0)
    if not all(clock.knows(copy.of) for host in on_clock for copy in host.of(HeardRecord)):
        slack_ns += _HEARING_NS
    ordered = tuple(_ordered(files, slack_ns))
    return MergedHistory(clock.reference, (job, *ordered), clock, _incomplete(hosts, clock, ordered))


def _first_coordinator(hosts: Sequence[HostRecords], read: ReadLine) -> str:
    """Returns the host that made the first epoch; of a run without one, the first host."""
    epochs = [(own.epoch, host.node) for host in hosts for own in host.of(EpochRecord)]
    copies = ((copy.of, read(copy.line)) for host in hosts for copy in host.of(HeardRecord))
    epochs += [(record.epoch, of) for of, record in copies if isinstance(record, EpochRecord)]
    return min(epochs, default=(0, hosts[0].node))[1]


def _last_coordinator(hosts: Sequence[HostRecords], clock: SharedClock) -> str:
    decisions = (
        (clock.at(host.node, decision.at_ns).at_ns, host.node)
        for host in hosts
        for decision in (*host.of(EpochRecord), *host.of(GoRecord), *host.of(CommitRecord))
    )
    return max(decisions, default=(0, hosts[0].node if hosts else ""))[1]


def _own(host: HostRecords, clock: SharedClock, *, is_last: bool) -> Iterator[StampedRecord]:
    """Yields the records that a host has made, in the order of its clock and with times of the shared one."""
    for record in sorted(host.of(StampedRecord), key=attrgetter("at_ns")):
        if isinstance(record, JobRecord | HeardRecord):
            continue
        if isinstance(record, _ENDS) and not is_last:
            continue
        if isinstance(record, ClockRecord):
            other = record.of if host.node == clock.reference else host.node
            if not clock.knows(other):
                continue
            at_ns, within_ns = clock.at(host.node, record.at_ns)
            middle_ns = OffsetBounds(record.least_ns, record.most_ns).middle_ns
            within_ns = max(within_ns, clock.at(record.of, record.at_ns + middle_ns).within_ns)
            yield replace(record, at_ns=at_ns, of=other, least_ns=-within_ns, most_ns=within_ns)
        else:
            yield on_clock(record, partial(_at, clock, host.node))


def _rising(records: Iterable[StampedRecord]) -> Iterator[StampedRecord]:
    """Yields records of one host; a time that seems to go back, as the bounds of its clock change, stays instead."""
    reached_ns = 0
    for record in records:
        reached_ns = max(reached_ns, record.at_ns)
        yield record if record.at_ns == reached_ns else replace(record, at_ns=reached_ns)


def _copies(hosts: Sequence[HostRecords], clock: SharedClock, read: ReadLine) -> list[StampedRecord]:
    """Returns the decisions whose own record is missing, from the copies of other hosts, in the order of time."""
    decisions: dict[tuple[str, str], StampedRecord] = {}
    for host in hosts:
        for copy in host.of(HeardRecord):
            record = read(copy.line)
            if not isinstance(record, StampedRecord):
                continue
            key = copy.of, repr(record)
            if clock.knows(copy.of):
                record = on_clock(record, partial(_at, clock, copy.of))
            else:
                record = replace(record, at_ns=_at(clock, host.node, copy.at_ns))
            decisions[key] = min(decisions.get(key, record), record, key=attrgetter("at_ns"))
    deciders = {of for of, _ in decisions}
    for host in hosts:
        for own in host.of(StampedRecord) if host.node in deciders else ():
            decisions.pop((host.node, repr(own)), None)
    return sorted(decisions.values(), key=attrgetter("at_ns"))


def _at(clock: SharedClock, node: str, at_ns: int) -> int:
    return clock.at(node, at_ns).at_ns


def _ordered(files: Sequence[Sequence[StampedRecord]], slack_ns: int) -> Iterator[StampedRecord]:
    """Yields the records of all files: the earliest head of a file, unless its cause is still to come."""
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
        _, _, number, record = min(heads, key=itemgetter(0, 1, 2))
        places[number] += 1
        since_ns = causes.take(record, number)
        yield record if since_ns <= record.at_ns else replace(record, at_ns=since_ns)


def _incomplete(
    hosts: Sequence[HostRecords], clock: SharedClock, ordered: Sequence[StampedRecord]
) -> dict[str, tuple[str, ...]]:
    """Returns the reasons why the records of some hosts are not whole."""
    there = {host.node for host in hosts}
    named = {started.node for host in hosts for started in host.of(StartedRecord)}
    named |= {record.of for host in hosts for record in host.of(ClockRecord)}
    named |= {copy.of for host in hosts for copy in host.of(HeardRecord)}
    absent = ("no folder of it was given",)
    reasons: dict[str, tuple[str, ...]] = dict.fromkeys(sorted(named - there - {""}), absent)
    end_ns = max((record.at_ns for record in ordered), default=0)
    for host in hosts:
        if why := tuple(_gaps(host, clock, end_ns)):
            reasons[host.node] = why
    return reasons


def _gaps(host: HostRecords, clock: SharedClock, end_ns: int) -> Iterator[str]:
    if not clock.knows(host.node):
        yield "its records are left out: no host has recorded its clock"
    if lines := [each.number for each in host.records if isinstance(each, UnreadLine)]:
        yield f"{numbered('line', lines)} of its events could not be read"
    if host.is_cut:
        yield "its events end inside of a line"
    yield from map(str, host.of(LostRecord))
    if not host.of(EndedRecord) and clock.knows(host.node):
        last_ns = max((clock.at(host.node, record.at_ns).at_ns for record in host.of(StampedRecord)), default=end_ns)
        yield f"its records stop {(end_ns - last_ns) / _S:.3f} s before those of the run, and do not include its end"
