"""The records of several hosts as one history: on one clock, each decision once, no order before its cause."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from operator import add, attrgetter
from typing import Any

import pytest

from engine.core.exclusion import Cause, Verdict, excluded
from engine.core.history.merging import Causes, HostRecords, SharedClock, merged
from engine.core.history.process_records import (
    ClockRecord,
    EndedRecord,
    ExitRecord,
    HeardRecord,
    HostRecord,
    LostRecord,
    on_clock,
)
from engine.core.history.record_lines import RECORDS, encoded
from engine.core.history.run_records import (
    AGENT,
    CommitRecord,
    EpochRecord,
    GoRecord,
    JobRecord,
    MarkRecord,
    PlanRecord,
    Record,
    StampedRecord,
    UnreadLine,
    ValidationRecord,
)
from tests.core.made_records import made

MS = 1_000_000
HOUR = 3_600_000 * MS
PHASES = ("fence", "inventory", "plan", "regroup")


def stamp(at_ns: int, worker: int = AGENT) -> dict[str, Any]:
    return {"worker": worker, "pid": 7, "at_ns": at_ns}


def on_shared(clock: SharedClock, node: str, at_ns: int) -> int:
    return clock.at(node, at_ns).at_ns


def run_of(workers: int, draw: random.Random) -> list[StampedRecord]:
    """A run with recoveries, as one true clock sees it: each effect comes 20 to 300 us after its cause."""
    now_ns, found = HOUR, list[StampedRecord]()

    def then(record: type[StampedRecord], worker: int = AGENT, **told: Any) -> None:
        nonlocal now_ns
        now_ns += draw.randint(20_000, 300_000)
        found.append(record(**stamp(now_ns, worker), **told))

    members = [*range(workers)]
    for epoch in range(1, workers):
        verdict: Verdict = ()
        if epoch > 1:
            out = members.pop(draw.randrange(len(members)))
            then(ExitRecord, of=out, code=-9, expected=False, seen_ns=now_ns)
            verdict = (excluded(out, Cause.DEATH, "was ended by SIGKILL"),)
        told: dict[str, Any] = {"reason": "x", "planned": False, "owners": (0,), "shadows": ((),)}
        then(EpochRecord, epoch=epoch, members=tuple(members), verdict=verdict, **told)
        for phase in PHASES[:2]:
            for worker in draw.sample(members, len(members)):
                then(MarkRecord, worker, phase=phase, epoch=epoch)
        then(PlanRecord, epoch=epoch, committed=-1, prepared=False)
        for worker in draw.sample(members, len(members)):
            then(MarkRecord, worker, phase="plan", epoch=epoch)
        then(GoRecord, epoch=epoch, end=False)
        then(CommitRecord, step=epoch, loss=1.0, grad_norm=1.0, clip_factor=1.0, last=False)
        then(ValidationRecord, draw.choice(members), step=epoch, name="v", samples=1, loss=1.0, metrics={})
    return found


def on_hosts(run: Sequence[StampedRecord], draw: random.Random, heard: bool = True) -> list[HostRecords]:
    """The records of a run as three hosts have them, whose clocks differ by hours and are known within 1 ms."""
    ahead = {"a": 0, "b": draw.randint(-HOUR, HOUR), "c": draw.randint(-HOUR, HOUR)}
    files: dict[str, list[Record]] = {}
    for node, ahead_ns in ahead.items():
        at_ns = run[0].at_ns - MS + ahead_ns
        host = HostRecord(**stamp(at_ns), cpu="x", cores=1, python="", torch="", began="", node=node, run_id="r")
        files[node] = [made("job", steps=9, results=node, at_ns=at_ns), host]
    for node in "bc":
        for at_ns in range(run[0].at_ns, run[-1].at_ns + 5 * MS, 5 * MS):
            least_ns = ahead[node] - draw.randint(0, 2 * MS)
            bounds = {"least_ns": least_ns, "most_ns": least_ns + 2 * MS}
            files["a"].append(ClockRecord(**stamp(at_ns), of=node, **bounds))
    for each in run:
        node = "abc"[each.worker % 3] if each.worker != AGENT else "a"
        files[node].append(on_clock(each, partial(add, ahead[node])))
        if each.worker == AGENT and heard:
            for other in "bc":
                at_ns = each.at_ns + draw.randint(20_000, 300_000) + ahead[other]
                files[other].append(HeardRecord(**stamp(at_ns), of="a", line=encoded(each)))
    for node, ahead_ns in ahead.items():
        files[node].append(EndedRecord(**stamp(run[-1].at_ns + MS + ahead_ns), outcome="finished", exit_code=0))
    return [HostRecords(node, records) for node, records in files.items()]


def told(records: Sequence[Record]) -> list[Any]:
    """The records without times."""
    apart = (ClockRecord, HostRecord, JobRecord, EndedRecord)
    plain = (each for each in records if not isinstance(each, apart) and isinstance(each, StampedRecord))
    return [replace(each, at_ns=0, **({"seen_ns": 0} if isinstance(each, ExitRecord) else {})) for each in plain]


def misplaced(records: Sequence[Record]) -> list[StampedRecord]:
    """The records that stand before a cause of theirs."""
    stamped = [each for each in records if isinstance(each, StampedRecord)]
    causes, found = Causes([stamped], HOUR), list[StampedRecord]()
    for each in stamped:
        if causes.waits(each, -1):
            found.append(each)
        causes.take(each, 0)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_the_records_of_three_hosts_become_the_history_of_the_run(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    run = run_of(5, draw)
    hosts = on_hosts(run, draw)
    found = merged(hosts)
    assert (found.reference, found.incomplete) == ("a", {})
    assert isinstance(found.records[0], JobRecord) and found.records[0].job.results == "a"
    for kind in (JobRecord, EndedRecord):
        assert len([each for each in found.records if isinstance(each, kind)]) == 1
    assert misplaced(found.records) == []
    assert sorted(map(repr, told(found.records))) == sorted(map(repr, told(run)))  # each decision once
    truth = {repr(one): each.at_ns for one, each in zip(told(run), run, strict=True)}
    stamped = [each for each in found.records if isinstance(each, StampedRecord)]
    for one, each in zip(told(found.records), (each for each in stamped if told([each])), strict=True):
        assert abs(each.at_ns - truth[repr(one)]) <= 1.1 * MS


def test_by_time_alone_orders_stand_before_their_causes() -> None:
    """The control: bounds of 2 ms are wider than the messages between hosts take."""
    wrong = 0
    for seed in range(20):
        draw = random.Random(seed)  # noqa: S311
        hosts = on_hosts(run_of(5, draw), draw)
        found = merged(hosts)
        by_time = [
            on_clock(each, partial(on_shared, found.clock, host.node))
            for host in hosts
            for each in host.of(StampedRecord)
            if isinstance(each, MarkRecord | PlanRecord | EpochRecord | GoRecord)
        ]
        wrong += len(misplaced(sorted(by_time, key=attrgetter("at_ns"))))
        assert misplaced(found.records) == []
    assert wrong > 20


@pytest.mark.parametrize("knows", [True, False])
def test_without_the_coordinators_folder_its_decisions_are_those_that_others_heard(knows: bool) -> None:
    draw = random.Random(5)  # noqa: S311
    run = run_of(5, draw)
    a, b, c = on_hosts(run, draw)
    if knows:  # each host records the clock of the coordinator too
        facts = [each for each in a.records if isinstance(each, ClockRecord)]
        more = {
            host.node: [
                replace(each, of="a", at_ns=each.at_ns + each.least_ns, least_ns=-each.most_ns, most_ns=-each.least_ns)
                for each in facts
                if each.of == host.node
            ]
            for host in (b, c)
        }
        b, c = (replace(host, records=[*host.records, *more[host.node]]) for host in (b, c))
    else:
        c = b
    found = merged([b, c] if knows else [b])
    assert found.reference == ("a" if knows else "b")
    assert found.incomplete["a"] == ("no folder of it was given",)
    for kind in (EpochRecord, PlanRecord, GoRecord, CommitRecord):
        ours = [each for each in run if isinstance(each, kind)]
        assert told([each for each in found.records if isinstance(each, kind)]) == told(ours)
    assert misplaced(found.records) == []


def test_hosts_with_incomplete_records_are_named_with_the_reason() -> None:
    draw = random.Random(1)  # noqa: S311
    a, b, c = on_hosts(run_of(4, draw), draw)
    torn = UnreadLine(number=8)
    lost = LostRecord(**stamp(b.of(StampedRecord)[-1].at_ns, 1), records=3, why="No space left on device")
    b = HostRecords("b", [*b.records[:-1], torn, lost], is_cut=True)
    found = merged([a, b, replace(c, node="d")])
    assert found.incomplete["b"][:3] == (
        "line 8 of its events could not be read",
        "its events end inside of a line",
        "worker 1 could not write 3 records: No space left on device",
    )
    assert "do not tell its end" in found.incomplete["b"][3]
    assert found.incomplete["c"] == ("no folder of it was given",)
    assert found.incomplete["d"] == ("its records are left out: no host has recorded its clock",)
    assert "a" not in found.incomplete


def test_every_time_of_a_record_is_moved_and_no_length() -> None:
    lengths = {"copy_ns", "write_ns", "sync_ns", "least_ns", "most_ns"}
    for kind, record in RECORDS.items():
        names = {each.name for each in fields(record) if each.name.endswith("_ns")} - lengths
        assert names <= {"at_ns", "seen_ns", "start_ns", "end_ns"}, kind
        if "start_ns" in names:  # actions stand in files of their own
            continue
        if issubclass(record, StampedRecord) and names - {"at_ns"}:
            assert names == {"at_ns", "seen_ns"} and record is ExitRecord
    moved = on_clock(made("exit"), lambda at_ns: at_ns + 10)
    before = made("exit")
    assert (moved.at_ns, moved.seen_ns) == (before.at_ns + 10, before.seen_ns + 10)
    silent = excluded(1, Cause.SILENCE, "was silent", alive_ns=50)
    out = on_clock(replace(made("epoch"), verdict=(silent,)), lambda at_ns: at_ns + 10)
    assert out.verdict[0].alive_ns == 60
