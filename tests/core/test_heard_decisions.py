"""Decisions that a host has heard, as records of its own: on its clock, and only they."""

from __future__ import annotations

from dataclasses import replace

from engine.core.history.process_records import ClockRecord, ExitRecord, HeardRecord
from engine.core.history.record_lines import encoded
from engine.core.history.run_history import ReplicatedDecisions, RunHistory, coordinating_host, gaps
from engine.core.history.run_records import CommitRecord, EpochRecord
from tests.core.made_records import AGENT

COMMIT = CommitRecord(**{**AGENT, "at_ns": 5_000}, step=3, loss=0.5, grad_norm=1.0, clip_factor=1.0, last=False)


def heard(record: CommitRecord | ExitRecord, at_ns: int) -> HeardRecord:
    return HeardRecord(**{**AGENT, "at_ns": at_ns}, of="b", line=encoded(record))


def clock(least_ns: int, most_ns: int) -> ClockRecord:
    return ClockRecord(**{**AGENT, "at_ns": 1}, of="b", least_ns=least_ns, most_ns=most_ns)


def test_a_decision_comes_onto_the_clock_of_the_host_that_has_heard_it() -> None:
    known = ReplicatedDecisions()
    assert known.decision(clock(3_990, 4_010)) is None
    told = known.decision(heard(COMMIT, 1_500))
    assert isinstance(told, CommitRecord)
    assert (told.at_ns, told.step, told.loss) == (1_000, 3, 0.5)


def test_before_the_clock_is_known_a_decision_has_the_time_at_which_it_was_heard() -> None:
    told = ReplicatedDecisions().decision(heard(COMMIT, 1_500))
    assert told is not None
    assert told.at_ns == 1_500


def test_all_times_of_a_decision_move() -> None:
    known = ReplicatedDecisions()
    known.decision(clock(4_000, 4_000))
    told = known.decision(
        heard(ExitRecord(**{**AGENT, "at_ns": 5_000}, of=1, code=-9, expected=False, seen_ns=4_900), 1_500)
    )
    assert isinstance(told, ExitRecord)
    assert (told.at_ns, told.seen_ns) == (1_000, 900)


def test_own_records_are_no_heard_ones() -> None:
    assert ReplicatedDecisions().decision(COMMIT) is None


def test_the_host_that_coordinates_is_the_one_that_was_heard_last() -> None:
    epoch = EpochRecord(
        **AGENT, epoch=1, members=(0,), verdict=(), reason="", planned=False, owners=(0,), shadows=((),)
    )
    of_b = [HeardRecord(**AGENT, of="b", line=encoded(each)) for each in (epoch, COMMIT)]
    of_c = HeardRecord(**AGENT, of="c", line=encoded(replace(epoch, epoch=2)))
    known, history = ReplicatedDecisions(), RunHistory()
    assert coordinating_host(history) == ""
    for each, chief in ((of_b[0], "b"), (of_b[1], "b"), (of_c, "c"), (replace(epoch, epoch=3), "")):
        history.add(each)
        if (decision := known.decision(each)) is not None:
            history.add(decision)
        assert coordinating_host(history) == chief
        assert any("host b coordinates" in text for text in gaps(history)) is (chief == "b")
