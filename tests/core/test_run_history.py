"""The history of a run: what its records add up to, after each of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.codec.records import decoded, encoded
from engine.core.history.process_records import ClockRecord, ExitRecord, HeardRecord
from engine.core.history.run_history import ReplicatedDecisions, RunHistory, coordinating_host, gaps
from engine.core.history.run_records import CommitRecord, EpochRecord, FaultRecord, StaysRecord
from engine.core.job.job import Job
from tests.core.made_records import AGENT, made, made_history

EVENTS: list[dict[str, Any]] = [
    {"event": "job", "stages": 2, "steps": 9, "at_ns": 1},
    {"event": "started", "of": 0, "slots": [[0, 0]], "at_ns": 2},
    {"event": "started", "of": 1, "slots": [[0, 1]], "at_ns": 3},
    {"event": "epoch", "epoch": 1, "owners": [0, 1], "at_ns": 4},
    {"event": "go", "epoch": 1, "at_ns": 5},
    {"event": "commit", "step": 0, "at_ns": 6},
    {"event": "fault", "fault": "1:1", "of": 1, "at_ns": 7},
    {"event": "confirmed", "fault": "1:1", "at_ns": 8},
    {"event": "epoch", "epoch": 2, "owners": [0, 1], "at_ns": 9},
    {"event": "heirs", "epoch": 2, "owners": [0, 0], "at_ns": 10},
    {"event": "commit", "step": 1, "at_ns": 11},
    {"event": "failed", "error": "why", "at_ns": 12},
    {"event": "training_ended", "outcome": "failed", "exit_code": 3, "at_ns": 13},
    {"event": "ended", "outcome": "failed", "exit_code": 1, "at_ns": 14},
]


def test_owners_follow_epochs_and_the_heirs_that_were_known_later() -> None:
    assert made_history(EVENTS[:3]).owners == {(0, 0): 0, (0, 1): 1}
    assert made_history(EVENTS[:9]).owners == {(0, 0): 0, (0, 1): 1}
    history = made_history(EVENTS[:10])
    assert history.owners == {(0, 0): 0, (0, 1): 0}
    assert [each.owners for each in history.epochs] == [(0, 1), (0, 0)]


def test_a_last_checkpoint_that_was_not_kept_is_told() -> None:
    kept = [{"event": "kept", "step": 3, "at_ns": 8}, {"event": "unkept", "step": 5, "why": "disk full", "at_ns": 9}]
    later = [*kept, {"event": "kept", "step": 6, "at_ns": 10}]
    assert [made_history(each).not_kept for each in (kept[1:], kept, kept[::-1], later, [])] == [
        "no checkpoint was kept: disk full",
        "no checkpoint after that of step 3 was kept: disk full",
        "no checkpoint after that of step 3 was kept: disk full",
        "",
        "",
    ]


def test_the_progress_the_faults_and_the_end_are_known_after_each_record() -> None:
    history = RunHistory()
    assert (history.committed, history.begin_ns, history.ended, history.error) == (-1, 0, None, "")
    said = []
    for event in EVENTS:
        history.add(made(**event))
        said.append((history.committed, len(history.struck), len(history.confirmed_ns), history.error))
    assert said == [
        *5 * [(-1, 0, 0, "")],
        (0, 0, 0, ""),
        (0, 1, 0, ""),
        *3 * [(0, 1, 1, "")],
        (1, 1, 1, ""),
        *3 * [(1, 1, 1, "why")],
    ]
    assert history.training_ended is not None
    assert history.ended is not None
    assert (history.training_ended.exit_code, history.ended.exit_code) == (3, 1)
    assert (history.job.steps, history.begin_ns) == (9, 5)


def test_training_that_never_began_counts_from_the_first_record() -> None:
    assert made_history(EVENTS[:4]).begin_ns == 1


def test_records_of_some_kinds_come_with_their_epoch() -> None:
    history = made_history([*EVENTS, {"event": "stays", "of": 0, "text": "x"}])
    kinds = [(epoch, type(each)) for epoch, each in history.in_epochs(CommitRecord, StaysRecord, FaultRecord)]
    assert kinds == [(1, CommitRecord), (1, FaultRecord), (2, CommitRecord), (2, StaysRecord)]
    assert [each.step for each in history.of(CommitRecord)] == [0, 1]
    assert history.of(StaysRecord) == [history.first(StaysRecord)]


def test_a_reader_that_begins_in_the_middle_says_what_was_before() -> None:
    history = RunHistory(Job(stages=2), True, {(0, 0): 0, (0, 1): 1})
    history.add(made(**EVENTS[9]))  # of an epoch that was not read
    assert history.owners == {(0, 0): 0, (0, 1): 1}
    history.add(made(**(EVENTS[8] | {"owners": [1, 1]})))
    assert history.owners == {(0, 0): 1, (0, 1): 1}


# Decisions that a host has heard, as records of its own: on its clock, and only they.


COMMIT = CommitRecord(**{**AGENT, "at_ns": 5_000}, step=3, loss=0.5, grad_norm=1.0, clip_factor=1.0, last=False)


def heard(record: CommitRecord | ExitRecord, at_ns: int) -> HeardRecord:
    return HeardRecord(**{**AGENT, "at_ns": at_ns}, of="b", line=encoded(record))


def clock(least_ns: int, most_ns: int) -> ClockRecord:
    return ClockRecord(**{**AGENT, "at_ns": 1}, of="b", least_ns=least_ns, most_ns=most_ns)


def test_a_decision_comes_onto_the_clock_of_the_host_that_has_heard_it() -> None:
    known = ReplicatedDecisions(decoded)
    assert known.decision(clock(3_990, 4_010)) is None
    told = known.decision(heard(COMMIT, 1_500))
    assert isinstance(told, CommitRecord)
    assert (told.at_ns, told.step, told.loss) == (1_000, 3, 0.5)


def test_before_the_clock_is_known_a_decision_has_the_time_at_which_it_was_heard() -> None:
    told = ReplicatedDecisions(decoded).decision(heard(COMMIT, 1_500))
    assert told is not None
    assert told.at_ns == 1_500


def test_all_times_of_a_decision_move() -> None:
    known = ReplicatedDecisions(decoded)
    known.decision(clock(4_000, 4_000))
    told = known.decision(
        heard(ExitRecord(**{**AGENT, "at_ns": 5_000}, of=1, code=-9, expected=False, seen_ns=4_900), 1_500)
    )
    assert isinstance(told, ExitRecord)
    assert (told.at_ns, told.seen_ns) == (1_000, 900)


def test_own_records_are_no_heard_ones() -> None:
    assert ReplicatedDecisions(decoded).decision(COMMIT) is None


def test_the_host_that_coordinates_is_the_one_that_was_heard_last() -> None:
    epoch = EpochRecord(
        **AGENT, epoch=1, members=(0,), verdict=(), reason="", planned=False, owners=(0,), shadows=((),)
    )
    of_b = [HeardRecord(**AGENT, of="b", line=encoded(each)) for each in (epoch, COMMIT)]
    of_c = HeardRecord(**AGENT, of="c", line=encoded(replace(epoch, epoch=2)))
    known, history = ReplicatedDecisions(decoded), RunHistory()
    assert coordinating_host(history) == ""
    for each, chief in ((of_b[0], "b"), (of_b[1], "b"), (of_c, "c"), (replace(epoch, epoch=3), "")):
        history.add(each)
        if (decision := known.decision(each)) is not None:
            history.add(decision)
        assert coordinating_host(history) == chief
        assert any("host b coordinates" in text for text in gaps(history)) is (chief == "b")
