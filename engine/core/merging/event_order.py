"""The records of several hosts of one run as one history: in one order, on one clock, each decision once.

Rules:
- The clock is that of the first coordinator; without any record about it, that of the first host. The records of a host
  without a known clock are left out.
- Records stand in the order of time: processes of one host write into one file, each a moment after it has taken the
  time. But none stands before its cause: clocks of hosts are known within bounds, causes for certain. Its time is then
  that of its cause.
- A decision is recorded by its host, and by each host that hears of it: a copy counts where the host's own record is
  missing. It has the time of the decision, or else that of its hearing, if the clock of its host is not known.
- The job is the first record. The end of the run is told by the host that coordinated last.
- A host whose record is incomplete is named, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from operator import attrgetter
from typing import TypeVar

from engine.core.config.job import Job
from engine.core.history.process_records import (
    ClockRecord,
    EndedRecord,
    ExitRecord,
    HeardRecord,
    LostRecord,
    StartedRecord,
    TrainingEndedRecord,
)
from engine.core.history.record import Record, StampedRecord, UnreadLine
from engine.core.history.record_lines import decoded, encoded
from engine.core.history.run_records import CommitRecord, EpochRecord, GoRecord, JobRecord
from engine.core.merging.causes import Causes
from engine.core.merging.clock_bounds import OffsetBounds
from engine.core.merging.shared_clock import ClockFact, SharedClock
from engine.core.texts import counted, numbered

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
class Merged:
    """The history of a run; `incomplete` says of some hosts why their records are not whole."""

    reference: str
    records: tuple[Record, ...]
    clock: SharedClock
    incomplete: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def merged(hosts: Sequence[HostRecords]) -> Merged:
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
    return Merged(clock.reference, (job, *ordered), clock, _incomplete(hosts, clock, ordered))


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
