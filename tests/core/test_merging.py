"""The records of several hosts as one history: on one clock, each decision once, no order before its cause."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from operator import add, attrgetter
from statistics import median
from typing import Any

import pytest

from engine.codec.records import RECORDS, decoded, encoded
from engine.core.exclusion import Cause, Verdict, excluded
from engine.core.history.merging import (
    DRIFT_PPM,
    WINDOW_NS,
    Causes,
    ClockFact,
    HostRecords,
    OffsetBounds,
    OffsetWatch,
    SharedClock,
    drifted_ns,
    merged,
)
from engine.core.history.process_records import (
    ClockRecord,
    EndedRecord,
    ExitRecord,
    HeardRecord,
    HostRecord,
    LostRecord,
    on_clock,
)
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
from tests.looped import looped

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
            verdict = (excluded(out, Cause.DEATH, "was killed (SIGKILL)"),)
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
            bounds: Any = {"least_ns": least_ns, "most_ns": least_ns + 2 * MS}
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
    seen: Any = {"seen_ns": 0}
    return [replace(each, at_ns=0, **(seen if isinstance(each, ExitRecord) else {})) for each in plain]


def misplaced(records: Sequence[Record]) -> list[StampedRecord]:
    """The records that stand before a cause of theirs."""
    stamped = [each for each in records if isinstance(each, StampedRecord)]
    causes, found = Causes([stamped], HOUR), list[StampedRecord]()
    for each in stamped:
        if causes.waits(each, -1):
            found.append(each)
        causes.take(each, 0)
    return found


@looped("seed", range(60))
def test_the_records_of_three_hosts_become_the_history_of_the_run(seed: int) -> None:
    draw = random.Random(seed)  # noqa: S311
    run = run_of(5, draw)
    hosts = on_hosts(run, draw)
    found = merged(hosts, decoded)
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
        found = merged(hosts, decoded)
        by_time = [
            on_clock(each, partial(on_shared, found.clock, host.node))
            for host in hosts
            for each in host.of(StampedRecord)
            if isinstance(each, MarkRecord | PlanRecord | EpochRecord | GoRecord)
        ]
        wrong += len(misplaced(sorted(by_time, key=attrgetter("at_ns"))))
        assert misplaced(found.records) == []
    assert wrong > 20


def test_the_order_within_one_file_is_known() -> None:
    """A step that is committed again, soon afterwards, is no cause of its first validation."""
    commit, validation = (replace(made(kind), step=5) for kind in ("commit", "validation"))
    records = [replace(each, **stamp(at_ns)) for each, at_ns in ((commit, 100), (validation, 101), (commit, 102))]
    causes = Causes([records, []], slack_ns=10)
    causes.take(records[0], 0)
    assert not causes.waits(records[1], 0)
    assert causes.waits(records[1], 1)


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
    found = merged([b, c] if knows else [b], decoded)
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
    found = merged([a, b, replace(c, node="d")], decoded)
    assert found.incomplete["b"][:3] == (
        "line 8 of its events could not be read",
        "its events end inside of a line",
        "worker 1 could not write 3 records: No space left on device",
    )
    assert "do not include its end" in found.incomplete["b"][3]
    assert found.incomplete["c"] == ("no folder of it was given",)
    assert found.incomplete["d"] == ("its records are left out: no host has recorded its clock",)
    assert "a" not in found.incomplete


def test_every_time_of_a_record_is_moved_and_no_length() -> None:
    lengths = {"copy_ns", "write_ns", "sync_ns", "least_ns", "most_ns", "worst_ns", "silent_ns", "back_ns", "busy_ns"}
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


# Offsets between clocks as bounds: the truth lies inside, whatever the delays are; and times on one shared clock.


S = 1_000 * MS


class Clocks:
    """Two clocks with a drawn offset and a drawn drift; `now_ns` is a third, true one."""

    def __init__(self, seed: int, ppm: float = DRIFT_PPM * 0.99):  # the rest is lost in roundings
        self.random = random.Random(seed)  # noqa: S311
        self.offset_ns = self.random.randint(-24 * HOUR, 24 * HOUR)
        self.drift = self.random.uniform(-ppm, ppm) / 1e6
        self.now_ns = self.random.randint(0, 48 * HOUR)
        self.began_ns = self.now_ns

    @property
    def own_ns(self) -> int:
        return self.now_ns

    @property
    def other_ns(self) -> int:
        return self.now_ns + self.offset_ns + round((self.now_ns - self.began_ns) * self.drift)

    def exchange(self, watch: OffsetWatch, delay_ns: tuple[int, int]) -> None:
        """A message from here, a while, and a message to here."""
        sent_ns = self.own_ns
        self.now_ns += self.random.randint(*delay_ns)
        watch.sent(sent_ns, self.other_ns)
        self.now_ns += self.random.randint(0, 300 * MS)
        sent_ns = self.other_ns
        self.now_ns += self.random.randint(*delay_ns)
        watch.received(sent_ns, self.own_ns)


@pytest.mark.parametrize("delay_ns", [(200_000, 300_000), (20_000, 40 * MS), (0, 0)])
def test_a_hundred_drawn_offsets_lie_inside_their_bounds(delay_ns: tuple[int, int]) -> None:
    widths = []
    for seed in range(100):
        clocks, watch = Clocks(seed), OffsetWatch()
        for _ in range(60):
            clocks.exchange(watch, delay_ns)
            for wait_ns in (0, 250 * MS, clocks.random.randint(0, 5 * S)):
                clocks.now_ns += wait_ns
                bounds = watch.at(clocks.own_ns)
                assert bounds is not None
                assert bounds.least_ns <= clocks.other_ns - clocks.own_ns <= bounds.most_ns
                if wait_ns == 250 * MS:
                    widths.append(bounds.most_ns - bounds.least_ns)
    assert delay_ns != (200_000, 300_000) or median(widths) <= MS


def test_bounds_without_the_growth_by_age_are_wrong() -> None:
    """The control: the same clocks leave bounds that forget the drift."""
    clocks, watch = Clocks(3, ppm=0), OffsetWatch()
    clocks.drift = 190e-6
    clocks.exchange(watch, (0, 1000))
    then = watch.at(clocks.own_ns)
    clocks.now_ns += 60 * S
    now = watch.at(clocks.own_ns)
    assert then is not None and now is not None
    assert now.least_ns <= clocks.other_ns - clocks.own_ns <= now.most_ns
    assert clocks.other_ns - clocks.own_ns > then.most_ns


def test_one_direction_bounds_nothing() -> None:
    watch = OffsetWatch()
    watch.sent(0, 5)
    watch.sent(10, 15)
    assert watch.at(20) is None
    watch.received(20, 21)
    assert watch.at(21) == OffsetBounds(-1, 6)  # 200 ppm of some nanoseconds are rounded up


def test_the_window_slides_and_keeps_the_newest_of_each_direction() -> None:
    watch = OffsetWatch()
    watch.sent(0, 1000)
    watch.received(1000, 2000)
    watch.sent(WINDOW_NS // 2, WINDOW_NS // 2 + 5 * MS)  # a worse one
    near = watch.at(WINDOW_NS // 2)
    assert near is not None and near.most_ns == 1000 + drifted_ns(WINDOW_NS // 2)
    watch.sent(WINDOW_NS + 1, WINDOW_NS + 1 + 7 * MS)  # the first one is out of the window now
    far = watch.at(WINDOW_NS + 1)
    assert far is not None and far.most_ns == 5 * MS + drifted_ns(WINDOW_NS // 2 + 1)
    assert far.least_ns == -1000 - drifted_ns(WINDOW_NS + 1 - 2000)  # old, and the newest of its direction


@pytest.mark.parametrize("jump_ns", [-HOUR, -5 * S, 5 * S, HOUR])
def test_a_clock_that_jumps_is_learned_anew(jump_ns: int) -> None:
    clocks, watch = Clocks(1), OffsetWatch()
    for _ in range(10):
        clocks.exchange(watch, (200_000, 300_000))
    clocks.offset_ns += jump_ns
    for _ in range(2):
        clocks.exchange(watch, (200_000, 300_000))
    bounds = watch.at(clocks.own_ns)
    assert bounds is not None
    assert bounds.least_ns <= clocks.other_ns - clocks.own_ns <= bounds.most_ns
    assert bounds.within_ns < MS


def test_times_of_hosts_stand_on_the_clock_of_the_first_coordinator() -> None:
    # b is 1 h ahead of a, c is 2 h behind b; c was compared with b only, which coordinated later.
    facts = [
        ClockFact("a", "b", 10 * S, OffsetBounds(HOUR - MS, HOUR + MS)),
        ClockFact("b", "c", HOUR + 12 * S, OffsetBounds(-2 * HOUR - 2 * MS, -2 * HOUR)),
    ]
    clock = SharedClock("a", facts)
    assert clock.at("a", 7) == (7, 0)
    at_ns, within_ns = clock.at("b", HOUR + 10 * S)
    assert at_ns == 10 * S
    assert within_ns == MS
    at_ns, within_ns = clock.at("c", -HOUR + 12 * S)  # 2 s after the fact about b
    assert abs(at_ns - 12 * S) <= within_ns
    assert 2 * MS <= within_ns <= 2 * MS + 2 * drifted_ns(3 * S)
    assert not clock.knows("d")
    with pytest.raises(KeyError):
        clock.at("d", 0)


def test_the_way_with_the_least_uncertainty_is_taken() -> None:
    facts = [
        ClockFact("a", "c", 0, OffsetBounds(-50 * MS, 50 * MS)),
        ClockFact("a", "b", 0, OffsetBounds(-MS, MS)),
        ClockFact("c", "b", 0, OffsetBounds(-MS, MS)),
    ]
    assert SharedClock("a", facts).at("c", 0) == (0, 2 * MS)


def test_times_between_two_facts_take_both_and_lie_inside() -> None:
    for seed in range(50):
        clocks, watch, facts = Clocks(seed), OffsetWatch(), []
        truths = []
        for _ in range(30):
            clocks.exchange(watch, (100_000, 2 * MS))
            bounds = watch.at(clocks.own_ns)
            assert bounds is not None
            facts.append(ClockFact("own", "other", clocks.own_ns, bounds))
            clocks.now_ns += clocks.random.randint(0, 20 * S)
            truths.append((clocks.own_ns, clocks.other_ns))
        for reference in ("own", "other"):
            clock = SharedClock(reference, facts)
            for own_ns, other_ns in truths:
                away, here = ("other", "own") if reference == "own" else ("own", "other")
                given_ns, true_ns = (other_ns, own_ns) if away == "other" else (own_ns, other_ns)
                found = clock.at(away, given_ns)
                assert abs(found.at_ns - true_ns) <= found.within_ns
                assert clock.at(here, true_ns) == (true_ns, 0)
