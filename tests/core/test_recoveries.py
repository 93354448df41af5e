"""Recoveries, read off made-up events whose times are round numbers of milliseconds."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.bench.figures import clock_widths_ms, commits_ns, fenced_s, gap_s, usual_ns
from engine.core.checks import recoveries as recovery_log
from engine.core.checks.recoveries import (
    PHASES,
    USUAL,
    Recovery,
    RecoveryLog,
    Stall,
    StepLengths,
    quantile,
    with_later_steps,
)
from engine.core.errors import InvariantError
from engine.core.exclusion import Cause, Exclusion, Position, Verdict, excluded, in_words
from engine.core.history.process_records import ClockRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord, MarkRecord, Record
from engine.core.job.job import Job
from tests.core.made_records import records_of

Event = dict[str, Any]

MS = 1_000_000
STALL = Stall(20 * MS, 20 * MS)


def recoveries(events: Iterable[Event]) -> list[Recovery]:
    return recovery_log.recoveries(records_of(events))


def agent(event: str, at: int, **fields: Any) -> Event:
    return {"event": event, "worker": -1, "at_ns": at * MS, **fields}


def mark(worker: int, phase: str, at: int, epoch: int = 1) -> Event:
    return {"event": "mark", "worker": worker, "at_ns": at * MS, "phase": phase, "epoch": epoch}


def did(worker: int, step: int, action: str, end: int) -> Event:
    times = {"start_ns": (end - 1) * MS, "end_ns": end * MS}
    return {"event": "action", "worker": worker, "step": step, "action": action, **times}


def exit_of(worker: int, seen: int, expected: bool = False) -> Event:
    return agent("exit", seen + 1, of=worker, code=-9, expected=expected, seen_ns=seen * MS)


def died(worker: int, how: str = "was killed", at: Position | None = None) -> Exclusion:
    return excluded(worker, Cause.DEATH, how, at)


def epoch(number: int, at: int, owners: tuple[int, ...], *verdict: Exclusion) -> Event:
    out = json.loads(json.dumps(verdict))
    return agent("epoch", at, epoch=number, members=[0], owners=list(owners), verdict=out, reason="an exit")


BEGIN = [
    agent("job", 0, stages=3, steps=9),
    *(agent("started", 1, of=worker, child=100 + worker, slots=[[0, worker]]) for worker in range(3)),
    agent("go", 2, epoch=0),
]
COMMITS = [
    did(1, 0, "1F2", 60),  # the first step does not count
    agent("commit", 100, step=0),
    did(1, 1, "1F2", 110),
    agent("commit", 150, step=1),
    did(1, 2, "1F2", 160),
    agent("commit", 200, step=2),
]
# Worker 2, which owns the last stage, has finished two forwards and one backward of step 3.
BEFORE = [
    *(did(2, 3, action, 201 + index) for index, action in enumerate(["2F0", "2F1", "2B0"])),
    did(1, 3, "1F2", 209),
]
FAULT = agent("fault", 210, fault="3:2", of=2)
RECOVERED = [
    exit_of(2, 212),
    epoch(1, 215, (0, 1, 1), died(2)),
    mark(0, "fence", 216),
    mark(1, "fence", 220),
    mark(0, "inventory", 222),
    mark(1, "inventory", 223),
    mark(1, "regroup", 221),
    mark(0, "regroup", 226),
    agent("plan", 227, epoch=1),
    agent("go", 230, epoch=1),
]
REPLAYED = [
    did(1, 3, "2f0", 231),
    did(1, 3, "2F1", 240),
    did(1, 3, "2F2", 250),
    did(1, 3, "2B0", 260),
    did(1, 3, "2B1", 270),
    did(0, 3, "0B0", 280),
]
COMMIT = agent("commit", 330, step=3)


def test_a_kill_is_told_in_phases_that_add_up_to_the_pause() -> None:
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, *RECOVERED, *REPLAYED, COMMIT])
    assert (found.epoch, found.step, found.faults) == (1, 3, ("3:2",))
    assert found.verdict == (died(2),)
    assert found.last_actions == {2: (3, "2B0")}
    assert found.heirs == (((0, 2), 2, 1),)
    expected = {"detect": 2, "agree": 3, "fence": 5, "regroup": 3, "inventory": 3, "plan": 4, "replay": 30}
    assert {phase: taken // MS for phase, taken in found.phases_ns.items()} == expected
    assert tuple(found.phases_ns) == PHASES
    assert found.pause_ns == 50 * MS  # from the fault to the end of the 2B0 that was made again
    assert found.resume_ns == 330 * MS
    assert found.merged_ns == 70 * MS
    assert found.stall == Stall(80 * MS, 80 * MS)  # from the commit at 200 to that at 330, less a usual step of 50
    assert (found.lost_steps, found.rung) == (0, "shadow")


def test_a_recovery_takes_time_even_in_a_step_that_is_shorter_than_a_slow_one_before() -> None:
    """With one usual step, which a busy machine had made long, training had stalled for 0: any limit was held."""
    slow = [agent("commit", 100, step=0), did(1, 1, "1F2", 160), agent("commit", 196, step=1)]
    handed_on = [did(1, 2, "2F0", 231), agent("commit", 290, step=2)]
    (found,) = recoveries([*BEGIN, *slow, did(1, 2, "1F2", 209), FAULT, *RECOVERED, *handed_on])
    assert found.stall == Stall(21 * MS, 21 * MS)  # no action ended from 209 to 230, and a step of 96 is in the rest


def test_what_a_zombie_does_after_its_verdict_is_not_looked_at() -> None:
    zombie = [did(2, 3, action, 218 + index) for index, action in enumerate(["2B1", "2F2", "2B2"])]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, *RECOVERED, *zombie, *REPLAYED, COMMIT])
    assert (found.last_actions, found.pause_ns) == ({2: (3, "2B0")}, 50 * MS)


def test_it_reads_as_one_sentence() -> None:
    events = [*BEGIN, *COMMITS, *BEFORE, FAULT, *RECOVERED, *REPLAYED, COMMIT]
    (found,) = recoveries(events)
    sentence = (
        "worker 2 was killed in step 3 after 2B0; worker 1 took over stage 2; training stalled for 80 ms, 0 steps lost"
    )
    assert str(found) == sentence
    events[-len(RECOVERED) - len(REPLAYED)] = epoch(1, 215, (0, 1, 1), died(2, at=Position(2, 53, waiting=True)))
    (found,) = recoveries(events)
    assert str(found) == sentence
    (found,) = recoveries([*BEGIN, *COMMITS, *RECOVERED[:2]])
    assert str(found) == "worker 2 was killed; worker 1 was to take over stage 2; not recovered"


@pytest.mark.parametrize(
    ("verdict", "reason", "heir", "sentence"),
    [
        (
            (),
            "worker 2 handed over after step 3",
            ((0, 2), 2, 1),
            "worker 2 handed over after step 3; worker 1 took over stage 2; training stalled for 20 ms",
        ),
        (
            (excluded(2, Cause.LEFT, "has left after step 5"),),
            "",
            None,
            "worker 2 has left after step 5; training stalled for 20 ms",
        ),
        (
            (excluded(2, Cause.HANG, "hangs for 9 s (limit 5 s)", Position(3, 7, waiting=False)),),
            "",
            ((1, 2), 2, 1),
            "worker 2 hangs for 9 s (limit 5 s) in step 3 after 2B0; worker 1 took over stage 2 of pipeline 1; "
            "training stalled for 20 ms, 0 steps lost",
        ),
        (
            (),
            "a transfer failed, but no worker has died",
            None,
            "a transfer failed, but no worker has died; training stalled for 20 ms, 0 steps lost",
        ),
    ],
)
def test_every_kind_reads_well(verdict: Verdict, reason: str, heir: Any, sentence: str) -> None:
    at = {each.worker: (3, "2B0") for each in verdict}
    heirs = (heir,) if heir else ()
    found = Recovery(
        1, 4, reason or in_words(verdict), verdict, at, heirs, (), 0, {}, 1, stall=STALL, planned="lost" not in sentence
    )
    assert str(found) == sentence
    failed = replace(found, planned=False)
    assert str(failed).endswith("training stalled for 20 ms, 0 steps lost"), "the words of a reason decide nothing"


def test_the_record_of_an_epoch_says_that_it_was_planned() -> None:
    left = excluded(2, Cause.LEFT, "has left after step 2")
    planned = {**epoch(1, 215, (0, 1, 1), left), "planned": True}
    (found,) = recoveries([*BEGIN, *COMMITS, RECOVERED[0], planned, *RECOVERED[2:], COMMIT])
    assert (found.verdict, found.planned) == ((left,), True)
    assert str(found).endswith("; training stalled for 80 ms")


def test_a_worker_that_leaves_right_after_its_hand_over_has_a_stall() -> None:
    """Before, no step was usual in between, so each notice left a bound behind."""
    handed_over = [epoch(1, 201, (0, 1, 1)), agent("go", 205, epoch=1), agent("commit", 260, step=3)]
    leaves = [epoch(2, 330, (0, 1, 1), excluded(2, Cause.LEFT, "has left after step 4")), agent("go", 331, epoch=2)]
    later = [agent("commit", at, step=step) for step, at in ((4, 329), (5, 400), (6, 470), (7, 535), (8, 600))]
    planned = [event | {"planned": True} if event["event"] == "epoch" else event for event in [*handed_over, *leaves]]
    moved, left = recoveries([*BEGIN, *COMMITS, *planned[:3], later[0], *planned[3:], *later[1:]])
    assert (moved.stall, left.stall) == (Stall(10 * MS, 10 * MS), Stall(6 * MS, 6 * MS))


def test_a_record_without_causes_tells_of_deaths() -> None:
    old = {**epoch(1, 215, (0, 1, 1)), "verdict": [[2, "was killed"]]}
    (found,) = recoveries([*BEGIN, *COMMITS, RECOVERED[0], old, *RECOVERED[2:], COMMIT])
    assert (found.verdict, found.planned) == ((died(2),), False)


def test_regrouping_that_ends_last_is_charged_with_the_rest() -> None:
    late = [event for event in RECOVERED if event.get("phase") != "regroup"]
    (found,) = recoveries([*BEGIN, *COMMITS, *late, mark(0, "regroup", 233), COMMIT])
    assert (found.phases_ns["plan"], found.phases_ns["regroup"], found.phases_ns["replay"]) == (7 * MS, 3 * MS, 0)


@given(st.dictionaries(st.sampled_from(PHASES[:-1]), st.integers(0, 100)), st.integers(0, 100), st.integers(0, 100))
def test_phases_are_in_order_and_with_merged_all_of_the_time(points: dict[str, int], more: int, rest: int) -> None:
    """However they overlap."""
    points["replay"] = max([0, *points.values()]) + more
    found = Recovery(1, 0, "", (), {}, (), (), 0, points, points["replay"] + rest)
    assert [phase for phase in PHASES if phase in points] == list(found.phases_ns)
    assert min(found.phases_ns.values()) >= 0
    assert found.pause_ns == sum(found.phases_ns.values()) == points["replay"]
    assert (found.merged_ns, found.resume_ns) == (rest, points["replay"] + rest)


def test_plain_values_are_in_milliseconds() -> None:
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, *RECOVERED, *REPLAYED, COMMIT])
    assert found.as_dict() == {
        "epoch": 1,
        "step": 3,
        "culprits": [2],
        "verdict": ["worker 2 was killed"],
        "reason": "an exit",
        "last_actions": {2: "2B0 of step 3"},
        "heirs": [{"slot": [0, 2], "from": 2, "heir": 1}],
        "faults": ["3:2"],
        "phases_ms": {"detect": 2, "agree": 3, "fence": 5, "regroup": 3, "inventory": 3, "plan": 4, "replay": 30},
        "pause_ms": 50.0,
        "merged_ms": 70.0,
        "stall_ms": 80.0,
        "stall_bound": "",
        "stall_most_ms": 80.0,
        "rung": "shadow",
        "lost_steps": 0,
    }


def test_without_an_injected_fault_it_begins_when_the_end_was_seen() -> None:
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, *RECOVERED, *REPLAYED, COMMIT])
    assert (found.begin_ns, found.pause_ns, found.faults) == (212 * MS, 48 * MS, ())
    assert "detect" not in found.phases_ns  # the moment of death is not known; 0 ms would be too good


def test_an_exception_is_the_begin_of_its_recovery() -> None:
    """The recovery began when the exit was seen, some 10 ms later: the worker had to say what it had raised."""
    raised = agent("raised", 205, of=2, step=1, error="ValueError: x")
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, raised, *RECOVERED, *REPLAYED, COMMIT])
    assert (found.begin_ns, found.phases_ns["detect"]) == (205 * MS, 7 * MS)


def test_a_last_action_that_is_known_is_told_and_no_count_of_heartbeats() -> None:
    out = excluded(2, Cause.DEATH, "was killed (SIGKILL)", Position(3, 25, True))
    assert out.why.endswith("while it waited in step 3")
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, epoch(1, 215, (0, 1, 1), out), agent("go", 230, epoch=1)])
    told = "worker 2 was killed (SIGKILL)"
    assert str(found).startswith(f"{told} in step 3 after 2B0; ")
    assert (found.sentences, found.as_dict()["verdict"]) == ([told], [told])
    (blind,) = recoveries([*BEGIN, *COMMITS, epoch(1, 215, (0, 1, 1), out)])
    assert blind.sentences == [f"worker 2 {out.why}"]


@pytest.mark.parametrize(
    ("cause", "alive", "begin"),
    [
        (Cause.SILENCE, 208, 208),  # the last heartbeat
        (Cause.SILENCE, 150, 203),  # a finished action was later
        (Cause.HANG, 208, 203),  # the heart goes on
    ],
)
def test_silence_and_a_hang_begin_with_the_last_sign_of_life(cause: Cause, alive: int, begin: int) -> None:
    """Both began with the verdict: a worker that stood for 5.2 s was "recovered in 0.03 s", detect 0."""
    out = excluded(2, cause, "stands still", None, alive * MS)
    late = [epoch(1, 5215, (0, 1, 1), out), agent("go", 5230, epoch=1), agent("commit", 5330, step=3)]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, *late])
    assert (found.begin_ns, found.phases_ns["detect"]) == (begin * MS, (5215 - begin) * MS)
    assert found.noticed_ns == 5215 * MS  # by which a judgement from the middle of a run on takes it in
    assert str(found).startswith("worker 2 stands still in step 3 after 2B0; worker 1 took over stage 2; ")
    assert str(found).endswith("; training stalled for 5.08 s, 0 steps lost")


def test_of_two_failures_the_injected_one_does_not_hide_the_silent_one() -> None:
    out = excluded(2, Cause.SILENCE, "stands still", None, 204 * MS)
    late = [epoch(1, 5215, (0, 1, 1), out), agent("go", 5230, epoch=1), COMMIT]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, agent("fault", 5000, fault="slow", of=0), *late])
    assert found.begin_ns == 204 * MS


def test_a_word_that_was_lost_makes_all_workers_wait_from_their_last_action_on() -> None:
    late = [epoch(1, 60_000, (0, 1, 2)), agent("go", 60_010, epoch=1), agent("commit", 60_100, step=3)]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, *late])
    assert found.begin_ns == 209 * MS


def test_what_the_dead_had_not_finished_is_no_replay() -> None:
    (found,) = recoveries([*BEGIN, *COMMITS, *RECOVERED, *REPLAYED, COMMIT])
    assert found.phases_ns["replay"] == 0
    assert found.last_actions == {2: None}


def test_a_redundant_forward_of_the_dead_is_not_what_it_owned() -> None:
    shadowing = did(2, 3, "0F0", 205)
    (found,) = recoveries([*BEGIN, *COMMITS, shadowing, *RECOVERED, did(0, 3, "0F0", 280), COMMIT])
    assert found.phases_ns["replay"] == 0


def test_what_was_made_before_the_epoch_is_not_made_again() -> None:
    shadowed = [did(1, 3, "2F0", 203), did(1, 3, "2F1", 204)]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, *shadowed, *RECOVERED, did(1, 3, "2B0", 245), COMMIT])
    assert found.phases_ns["replay"] == 15 * MS


def test_a_mark_may_stand_before_the_record_of_its_epoch() -> None:
    told, fenced, *others = RECOVERED[1:]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, RECOVERED[0], fenced, told, *others, *REPLAYED, COMMIT])
    (usual,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, *RECOVERED, *REPLAYED, COMMIT])
    assert found == usual


def test_a_failure_during_a_recovery_is_part_of_it() -> None:
    second = [
        exit_of(1, 224),
        epoch(2, 225, (0, 0, 0), died(1)),
        mark(0, "fence", 228, 2),
        agent("go", 240, epoch=2),
    ]
    again = [did(0, 3, "2F0", 250), did(0, 3, "1F2", 262)]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, *RECOVERED[:4], *second, *again, COMMIT])
    assert (found.epoch, found.verdict) == (2, (died(2), died(1)))
    assert found.last_actions == {1: (3, "1F2"), 2: (3, "2B0")}
    assert found.heirs == (((0, 1), 1, 0), ((0, 2), 2, 0))
    assert found.phases_ns == {"detect": 2 * MS, "agree": 13 * MS, "fence": 3 * MS, "plan": 12 * MS, "replay": 22 * MS}


def test_the_next_recovery_counts_from_the_owners_of_the_last() -> None:
    second = [exit_of(1, 340), epoch(2, 341, (0, 0, 0), died(1)), agent("go", 342, epoch=2)]
    events = [*BEGIN, *COMMITS, *BEFORE, *RECOVERED, *REPLAYED, COMMIT, *second, agent("commit", 400, step=4)]
    first, last = recoveries(events)
    assert first.heirs == (((0, 2), 2, 1),)
    assert last.heirs == (((0, 1), 1, 0), ((0, 2), 1, 0))
    assert (last.step, last.lost_steps) == (4, 0)
    assert last.stall is not None
    assert last.stall.most_ns == (400 - 330) * MS  # under these owners no step is usual yet
    assert (last.stall.bound, str(last.stall)) == ("at least", "at least 12 ms, at most 70 ms")  # idle since the commit


def test_a_recovery_that_never_ended_says_how_far_it_came() -> None:
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, *RECOVERED[:4]])
    assert (found.pause_ns, found.resume_ns, found.stall) == (None, None, Stall(11 * MS, None))
    assert (found.merged_ns, found.rung) == (None, "none")
    assert list(found.phases_ns) == ["detect", "agree", "fence"]
    assert found.as_dict()["pause_ms"] is None


def test_after_the_last_commit_nothing_is_left_to_recover() -> None:
    commits = [*COMMITS[:-1], COMMITS[-1] | {"last": True}]  # of a job's steps, or of those before it was interrupted
    (found,) = recoveries([*BEGIN, *commits, did(2, 2, "2STEP", 201), FAULT, *RECOVERED])
    assert (found.after_end, found.step, found.heirs, found.rung) == (True, 2, (), "nothing was lost")
    assert str(found) == (
        "worker 2 was killed in step 2 after 2STEP; that was after the last commit, no step was left to recover"
    )
    assert found.pause_ns is None


def test_after_an_interruption_that_met_an_epoch_nothing_is_left_either() -> None:
    """The commit came before the interruption: only the start of the epoch says that no step follows."""
    handed_over = [epoch(1, 205, (0, 1, 1)), agent("go", 206, epoch=1, end=True)]
    killed = [exit_of(1, 240), epoch(2, 241, (0, 0, 0), died(1)), agent("go", 242, epoch=2, end=True)]
    (found,) = recoveries([*BEGIN, *COMMITS, *handed_over, *killed])
    assert (found.after_end, found.step, found.rung) == (True, 2, "nothing was lost")


def test_what_a_worker_does_after_a_commit_may_stand_before_its_record() -> None:
    *before, last = COMMITS
    early = [agent("fault", 201, fault="3:2", of=2), mark(0, "fence", 203), last]
    (found,) = recoveries([*BEGIN, *before, *early, *RECOVERED[:2], *RECOVERED[4:], *REPLAYED, COMMIT])
    assert (found.begin_ns, found.faults) == (201 * MS, ("3:2",))
    assert found.points_ns["fence"] == 203 * MS


def test_steps_that_are_done_again_are_lost() -> None:
    (found,) = recoveries([*BEGIN, *COMMITS, *RECOVERED, agent("commit", 300, step=1)])
    assert (found.step, found.lost_steps, found.rung) == (1, 2, "checkpoint")


def test_the_rung_says_where_the_state_came_from() -> None:
    adopted = [event | ({"adopted": [[0, 2]]} if event.get("phase") == "inventory" else {}) for event in RECOVERED]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, FAULT, *adopted, *REPLAYED, COMMIT])
    assert found.rung == "other pipeline"
    handed_over = [epoch(1, 201, (0, 1, 1)), agent("go", 205, epoch=1), COMMIT]
    (found,) = recoveries([*BEGIN, *COMMITS, *handed_over])
    assert (found.rung, found.heirs) == ("hand-over", (((0, 2), 2, 1),))


@pytest.mark.parametrize("backward", ["2B0", "2I0"])
def test_a_forward_and_a_backward_for_the_inputs_are_made_again_in_either_form(backward: str) -> None:
    """What the heir does for the weights alone is no replay."""
    before = [did(2, 3, "2F0", 201), did(2, 3, backward, 205)]
    after = [did(1, 3, "2I0", 243), did(1, 3, "2f0", 245), did(1, 3, "2W0", 290)]
    (found,) = recoveries([*BEGIN, *COMMITS, *before, FAULT, *RECOVERED, *after, COMMIT])
    assert found.phases_ns["replay"] == 15 * MS


def test_a_suspicion_without_a_dead_is_a_recovery_without_heirs() -> None:
    events = [agent("suspicion", 210, of=1), epoch(1, 214, (0, 1, 2)), agent("go", 220, epoch=1), COMMIT]
    (found,) = recoveries([*BEGIN, *COMMITS, *BEFORE, *events])
    assert (found.verdict, found.heirs, found.begin_ns) == ((), (), 210 * MS)
    assert found.rung == "nothing was lost"


def test_a_run_without_failures_has_none() -> None:
    assert recoveries([*BEGIN, *COMMITS, exit_of(0, 300, expected=True)]) == []
    assert recoveries([*BEGIN[:-1], epoch(1, 1, (0, 1, 2)), BEGIN[-1], *COMMITS]) == []


def test_who_begins_in_the_middle_of_a_run_says_what_came_before() -> None:
    log = RecoveryLog(RunHistory(Job(stages=3), True, {(0, worker): worker for worker in range(3)}))
    events = [*COMMITS[-1:], *BEFORE, FAULT, *RECOVERED, *REPLAYED, COMMIT]
    (found,) = [recovery for record in records_of(events) for recovery in log.read(record)]
    assert (found.pause_ns, found.heirs) == (50 * MS, (((0, 2), 2, 1),))
    assert found.stall is not None and found.stall.most_ns == 130 * MS


# The beginning of a run in which worker 1 is on another host, whose clock is known so well.
def on_hosts(within_ms: float) -> list[Any]:
    host = {"cpu": "x", "cores": 1, "python": "", "torch": "", "began": ""}
    nodes = ("a", "b", "a")
    told = [agent("started", 1, of=of, child=9 + of, slots=[[0, of]], node=nodes[of]) for of in range(3)]
    half_ns = round(within_ms * MS)
    clocks = [agent("clock", at, of="b", least_ns=-half_ns, most_ns=half_ns) for at in (1, 200)]
    hosts = [agent("host", 0, node=node, run_id="r", **host) for node in "ba"]
    return [BEGIN[0], *hosts, *told, *clocks, BEGIN[-1]]


def test_no_phase_is_told_that_is_shorter_than_its_uncertainty() -> None:
    events = [*COMMITS, *BEFORE, FAULT, *RECOVERED, *REPLAYED, COMMIT]
    (one_host,) = recoveries([*BEGIN, *events])
    assert one_host.uncertain_ns == {} and "uncertain_ms" not in one_host.as_dict()
    assert one_host.reported_ns == one_host.phases_ns | {"merged": one_host.merged_ns}
    (found,) = recoveries([*on_hosts(3.5), *events])
    # Worker 1, on host b, ends fence, inventory and replay: so both ends of the inventory are on b.
    assert set(found.uncertain_ns) == {"fence", "regroup", "replay", "merged"}
    assert all(3.5 * MS <= each < 3.6 * MS for each in found.uncertain_ns.values())
    assert set(found.reported_ns) == {*PHASES, "merged"} - {"regroup"}  # which took 3 ms, as the inventory did
    assert set(found.as_dict()["phases_ms"]) == {*PHASES} - {"regroup"}
    assert found.pause_ns == one_host.pause_ns
    (sure,) = recoveries([*on_hosts(0.1), *events])
    assert set(sure.reported_ns) == {*PHASES, "merged"}


# How long training stood, from made-up commits.


def lengths(*commits_ms: int, begin_ms: int | None = 0) -> StepLengths:
    found = StepLengths()
    if begin_ms is not None:
        found.begin(begin_ms * MS)
    for at_ms in commits_ms:
        found.commit(at_ms * MS, recovered=False)
    return found


def test_a_stall_is_the_gap_less_the_median_step() -> None:
    usual = lengths(900, 1000, 1100, 1230)  # the first step, which warms up, does not count
    assert usual.stall(5330 * MS, 0, 0) == Stall(4000 * MS, 4000 * MS)
    assert str(usual.stall(5330 * MS, 0, 0)) == "4.00 s"


def test_a_step_that_took_less_than_usual_is_no_stall() -> None:
    """A stall of -6.4 ms was printed before."""
    assert lengths(900, 1000).stall(1093 * MS, 0, 0) == Stall(0, 0)


def test_only_the_last_few_steps_are_usual() -> None:
    assert list(lengths(*range(0, 5000, 500), *range(5000, 5001 + 9 * USUAL, 9)).usual) == [9 * MS] * USUAL


def test_what_a_recovery_ends_and_the_step_after_it_are_not_usual() -> None:
    found = lengths(100, 200, 300)
    found.commit(2000 * MS, recovered=True)
    found.commit(2400 * MS, recovered=False)  # restores the shadows
    assert found.stall(3000 * MS, 0, 70 * MS) == Stall(70 * MS, 600 * MS)
    found.commit(2550 * MS, recovered=False)
    assert found.stall(3000 * MS, 0, 70 * MS) == Stall(300 * MS, 300 * MS)


@pytest.mark.parametrize(
    ("before", "resume_ms", "found", "text"),
    [
        (lengths(), 430, Stall(30 * MS, 430 * MS), "at least 30 ms, at most 430 ms"),
        (lengths(400), 430, Stall(30 * MS, 30 * MS), "at least 30 ms, at most 30 ms"),
        (lengths(begin_ms=None), 430, Stall(30 * MS, None), "at least 30 ms"),
        (lengths(100, 200), None, Stall(5700 * MS, None), "at least 5.70 s"),
        (lengths(), None, Stall(30 * MS, None), "at least 30 ms"),
    ],
)
def test_what_is_not_known_is_a_bound(before: StepLengths, resume_ms: int | None, found: Stall, text: str) -> None:
    stall = before.stall(None if resume_ms is None else resume_ms * MS, 6000 * MS, 30 * MS)
    assert stall == found
    assert str(stall) == (text if stall.bound else "30 ms")


def test_steps_that_follow_make_a_stall_known() -> None:
    commits_ns = [0, 90, 190, 290, 392]  # the first step restores the shadows
    assert with_later_steps(Stall(10, 130), commits_ns) == Stall(30, 30)
    assert with_later_steps(Stall(10, 130), commits_ns[:2]) == Stall(10, 130)
    assert with_later_steps(Stall(10, None), commits_ns) == Stall(10, None)


def test_bounds_of_a_quantile_are_quantiles_of_bounds() -> None:
    stalls = [Stall(5, 5), Stall(3, 9), Stall(1, None)]
    assert [quantile(stalls, part) for part in (0.3, 0.5, 1.0)] == [Stall(1, 5), Stall(3, 9), Stall(5, None)]


# The times of a loss on several hosts, from records on one clock.


S = 1_000_000_000


def marked(worker: int, phase: str, at_s: float) -> Record:
    return MarkRecord(worker=worker, phase=phase, epoch=1, at_ns=round(at_s * S))


def commit(step: int, at_s: float) -> Record:
    return CommitRecord(step=step, at_ns=round(at_s * S), loss=1.0, grad_norm=1.0, clip_factor=1.0, last=False)


def test_a_loss_is_known_when_the_last_worker_of_the_last_host_is_fenced_after_it() -> None:
    hosts = {
        "a": [marked(0, "fence", 1.0), marked(0, "fence", 7.01), marked(1, "regroup", 7.1), marked(1, "fence", 7.02)],
        "b": [marked(2, "fence", 7.04), marked(2, "fence", 7.3)],
        "c": [],
    }
    assert fenced_s(hosts, 7 * S, {"c"}) == pytest.approx(0.04)
    with pytest.raises(InvariantError, match="host c"):
        fenced_s(hosts, 7 * S)
    with pytest.raises(InvariantError, match="host a"):
        fenced_s(hosts, 8 * S, {"c"})


def test_a_gap_is_the_time_beyond_a_usual_step() -> None:
    hosts = {
        "a": [commit(0, 1.0), commit(1, 1.1), commit(2, 1.2), commit(3, 1.3)],
        "b": [commit(3, 1.4), commit(4, 2.0), commit(5, 2.1)],
    }
    found = commits_ns(hosts)
    assert [each / S for each in found] == [1.0, 1.1, 1.2, 1.3, 2.0, 2.1]
    assert usual_ns(found) == pytest.approx(0.1 * S)
    assert gap_s(found, round(1.35 * S)) == pytest.approx(0.6)
    with pytest.raises(InvariantError, match="after it"):
        gap_s(found, 3 * S)


def test_a_bound_that_lacks_the_offset_is_counted() -> None:
    def bound(of: str, least_ns: int, most_ns: int) -> Record:
        return ClockRecord(of=of, least_ns=least_ns, most_ns=most_ns)

    hosts = {
        "a": [],
        "b": [bound("a", -7_000_000, -5_000_000), bound("a", -6_000_000, -6_000_000), bound("a", 5_000_000, 7_000_000)],
        "c": [bound("b", 4_999_999, 5_000_001), bound("b", 5_000_001, 6_000_001)],
    }
    widths, outside = clock_widths_ms(hosts, {"a": 0, "b": 6_000_000, "c": 1_000_000})
    assert widths == pytest.approx([2.0, 0.0, 2.0, 0.000002, 1.0])
    assert outside == 2
