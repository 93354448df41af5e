"""The status of a run, read off the keys of one that lives and off the events of one that has ended."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from bamboo_cli.status_picture import headline
from engine.codec.documents import state_text, status_of_keys
from engine.core.errors import InvariantError
from engine.core.messages import WaitingMessage
from engine.core.protocol.events import ExitSeen, Notice, WorkerWord
from engine.core.protocol.run_status import RunStatus, WorkerStatus, live_status, status_of_history
from tests.core.made_records import made_history
from tests.core.membership_cases import committed, running, told
from tests.looped import looped

NOW_NS = 7000
MEMBER = {"pid": 7, "node": "host", "now": [[0, 2]], "before": []}


def keys(**others: bytes) -> dict[str, bytes]:
    """Returns the keys of a run with two steps committed, whose worker 1 has died; its slot is worker 0's now."""
    state = told(committed(committed(running())), ExitSeen(30, 1, -9))
    return {
        "coordinator": b"host:1",
        "state": state_text(state).encode(),
        "verdicts": json.dumps([[1, "every worker has joined"], [2, state.reason]]).encode(),
        "heartbeats": b'{"at_ns":7000,"ages":{"0":0.25,"1":3.0}}',
        "members/2": json.dumps(MEMBER).encode(),
        "members/0": json.dumps(MEMBER | {"pid": 5, "now": [[0, 0], [0, 1]], "before": [[0, 0]]}).encode(),
        "members/1": json.dumps(MEMBER | {"pid": 6, "now": [[0, 1]]}).encode(),
        "plan": b"\xff not looked at",
        **others,
    }


def test_keys_say_who_owns_what_and_what_was_decided() -> None:
    assert status_of_keys("mine", keys(), NOW_NS) == RunStatus(
        "mine",
        "failing over",
        epoch=2,
        committed=1,
        num_steps=10,
        workers=(
            WorkerStatus(0, 5, "host", ((0, 0), (0, 1)), ((0, 0),), "in", 0.25),
            WorkerStatus(1, 6, "host", (), ((0, 1),), "out", 3.0),
            WorkerStatus(2, 7, "host", ((0, 2),), (), "in", None),
        ),
        verdicts=((1, "every worker has joined"), (2, "worker 1 was killed (SIGKILL)")),
        unwritten_s=0.0,
    )


def test_ages_are_those_of_the_reading() -> None:
    """A launcher that stood still left ages of less than a second behind, and its run looked healthy."""
    found = status_of_keys("mine", keys(), NOW_NS + 6_000_000_000)
    assert (found.unwritten_s, found.workers[0].heard_s_ago) == (6.0, 6.25)
    assert headline(found, live=True).endswith(", no message from the launcher for 6.0 s")
    assert "launcher" not in headline(status_of_keys("mine", keys(), NOW_NS), live=True)


def test_the_heir_owns_a_stage_at_once() -> None:
    """Before, a stage had no owner for a second: the key of its heir is written less often than the state."""
    late = json.dumps(MEMBER | {"pid": 5, "now": [[0, 0]], "before": []}).encode()
    found = keys(**{"members/0": late})
    del found["members/1"]  # the key of a worker that has ended goes at once
    first, *_ = status_of_keys("mine", found, NOW_NS).workers
    assert (first.now, first.before) == (((0, 0), (0, 1)), ((0, 0),))


def test_a_live_run_shows_its_dead_and_the_last_action_of_each_worker() -> None:
    """Before, a dead worker was shown only after the end of the run, and no worker had a step."""
    died = event("exit", of=1, code=-9, expected=False)
    recorded = status_of_history("mine", made_history([*TRAINED, died]))
    found = keys()
    del found["members/1"]
    live = live_status(status_of_keys("mine", found, NOW_NS), recorded)
    assert [(each.worker, each.state, each.step, each.last_action, each.heard_s_ago) for each in live.workers] == [
        (0, "in", 0, "0F0", 0.25),
        (1, "dead", -1, "", None),
        (2, "in", -1, "", None),
    ]
    assert (live.phase, live.loss) == ("failing over", recorded.loss)
    still_there = live_status(status_of_keys("mine", keys(), NOW_NS), recorded)
    assert still_there.workers[1].state == "dead"


def test_a_status_tells_slow_workers_and_the_last_answer_of_the_policy() -> None:
    slow = event("pace", of=2, step=40, slowness=2.0, why="worker 2 is slow: x", at_ns=50)
    told = [*TRAINED, event("policy", step=39, why="nothing moves: y", owners=[]), slow]
    recorded = status_of_history("mine", made_history(told))
    assert recorded.policy == ("policy, asked after step 39: nothing moves: y", "since step 40: worker 2 is slow: x")
    live = live_status(status_of_keys("mine", keys(), NOW_NS), recorded)
    assert (live.policy, [each.state for each in live.workers]) == (recorded.policy, ["in", "out", "in"])
    first = live_status(live, status_of_history("mine", made_history([*told, {**slow, "of": 0}])))
    assert [each.state for each in first.workers] == ["slow", "out", "in"]
    well = {**slow, "slowness": 1.0, "why": "worker 2 is as fast as usual again: x"}
    moves = event("policy", step=43, why="2 blocks move", owners=[0, 0])
    later = status_of_history("mine", made_history([*told, moves, well]))
    assert later.policy == ("policy, asked after step 43: 2 blocks move (the move is to come)",)
    come = event("epoch", epoch=2, members=[0, 1], owners=[0, 0])
    assert status_of_history("mine", made_history([*told, moves, come, well])).policy[0].endswith("(the move is done)")
    begun = status_of_history("mine", made_history([*told, event("started", of=2, child=9, slots=[], at_ns=51)]))
    assert begun.policy == ("policy, asked after step 39: nothing moves: y",)
    at_start = made_history([*TRAINED, event("policy", step=-1, why="nothing moves: y", owners=[])])
    assert status_of_history("mine", at_start).policy == ("policy, asked before step 0: nothing moves: y",)


def test_keys_say_who_has_given_notice_and_cannot_leave() -> None:
    state = told(running(), *(Notice(5, worker, 1) for worker in range(3)))
    assert [each.state for each in status_of_keys("mine", keys(state=state_text(state).encode()), NOW_NS).workers] == [
        "cannot leave"
    ] * 3


def test_a_run_that_is_forming_has_few_keys() -> None:
    assert status_of_keys("mine", {"state": keys()["state"]}, NOW_NS).workers == ()


@looped(
    "others",
    [
        {"state": b"\xff"},
        {"state": b"[]"},
        {"members/0": b"\xff"},
        {"members/0": b"[]"},
        {"members/0": b"{}"},
        {"members/zero": json.dumps(MEMBER).encode()},
        {"members/0": json.dumps(MEMBER | {"now": [3]}).encode()},
        {"heartbeats": b"[]"},
        {"heartbeats": b"{"},
        {"heartbeats": b'{"0":0.25}'},
        {"verdicts": b"{"},
        {"verdicts": b"[3]"},
    ],
)
def test_garbage_is_refused_by_the_name_of_the_run(others: Mapping[str, bytes]) -> None:
    with pytest.raises(InvariantError, match="mine"):
        status_of_keys("mine", keys(**others), NOW_NS)


def event(kind: str, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "worker": -1, "pid": 1, "at_ns": 1, **fields}


STARTED = [
    event("job", steps=9, stages=2),
    event("started", of=1, child=12, slots=[[0, 1]]),
    event("started", of=0, child=11, slots=[[0, 0]]),
]
TRAINED = [
    *STARTED,
    event("epoch", epoch=1, reason="every worker has joined", members=[0, 1], owners=[0, 1]),
    {"event": "action", "worker": 0, "step": 0, "action": "0F0"},
    *(event("commit", step=step) for step in range(3)),
]


def test_a_job_with_epochs_tells_the_epoch_of_the_data() -> None:
    job, *others = TRAINED
    cut = event("partition", starts=[0, 1], layers=["a", "b"], samples=80)
    found = status_of_history("mine", made_history([{**job, "epochs": 4}, cut, *others]))
    assert (found.data_epoch, found.data_epochs) == (2, 4)
    live = live_status(RunStatus("mine", "running", 1, 2, 9), found)
    assert "step 3 of 9 (epoch 2 of 4 of the data)" in headline(live, live=True)
    assert status_of_history("mine", made_history([job, cut, *others])).data_epoch == 0


def test_events_are_followed_to_the_last() -> None:
    assert status_of_history("mine", made_history([])) == RunStatus("mine", "starting")
    begun = status_of_history("mine", made_history(STARTED))
    assert (begun.phase, begun.num_steps, begun.epoch, begun.committed) == ("starting", 9, 0, -1)
    assert [(each.worker, each.pid, each.now) for each in begun.workers] == [(0, 11, ((0, 0),)), (1, 12, ((0, 1),))]
    going = status_of_history("mine", made_history(TRAINED))
    assert (going.phase, going.epoch, going.committed) == ("running", 1, 2)
    assert going.verdicts == ((1, "every worker has joined"),)
    ends = [
        event("exit", of=1, code=-9, expected=False),
        event("failed", error="worker 1 was killed (SIGKILL)"),
        event("exit", of=0, code=-15, expected=True),
        event("ended", outcome="failed", exit_code=3),
    ]
    ended = status_of_history("mine", made_history(TRAINED + ends))
    assert (ended.phase, ended.committed) == ("failed", 2)
    assert {each.worker: each.state for each in ended.workers} == {0: "stopped", 1: "dead"}
    assert ended.verdicts[1:] == ((1, "worker 1 was killed (SIGKILL)"),)


def test_events_say_who_owns_what_after_a_failure() -> None:
    out = event("epoch", epoch=2, reason="an exit was seen", members=[0], owners=[0, 0])
    died = event("exit", of=1, code=-9, expected=False)
    found = status_of_history("mine", made_history([*TRAINED, died, out]))
    assert [(each.now, each.before, each.state) for each in found.workers] == [
        (((0, 0), (0, 1)), ((0, 0),), "in"),
        ((), ((0, 1),), "dead"),
    ]


def test_a_worker_that_a_verdict_put_out_is_dead() -> None:
    """The launcher expects the end of a worker that it kills itself: a worker that hung was said to have left."""
    figures = {"peak_stash": [], "peak_memory_kib": 1}
    events = [
        event("job", steps=9, stages=4),
        *(event("started", of=worker, child=11 + worker, slots=[[0, worker]]) for worker in range(4)),
        event("epoch", epoch=2, owners=[0, 0, 3, 3], verdict=[[1, "hangs", "hang"], [2, "has left", "left"]]),
        event("finished", of=0, **figures),
        *(event("exit", of=worker, code=code, expected=True) for worker, code in enumerate((0, -9, 86, -15))),
    ]
    workers = status_of_history("mine", made_history(events)).workers
    assert [each.state for each in workers] == ["finished", "dead", "left", "stopped"]


def test_a_worker_that_is_no_member_waits_or_starts() -> None:
    state = told(running(), WorkerWord(5, 3, WaitingMessage(), "host"), WorkerWord(6, 5, WaitingMessage(), "host"))
    state = told(state, ExitSeen(7, 5, -9))
    more = {f"members/{worker}": json.dumps(MEMBER | {"now": []}).encode() for worker in (3, 4, 5)}
    found = status_of_keys("run", keys(state=state_text(state).encode(), **more), NOW_NS)
    assert {each.worker: each.state for each in found.workers if each.worker > 2} == {
        3: "waiting",
        4: "starting",
        5: "out",
    }


def test_records_tell_who_waits_and_who_was_lost() -> None:
    started: list[dict[str, Any]] = [
        {"event": "started", "of": worker, "child": worker + 9, "slots": []} for worker in (3, 4, 5)
    ]
    waits = [{"event": "waiting", "of": worker, "lost": ""} for worker in (3, 5)]
    lost = [{"event": "waiting", "of": 5, "lost": "was killed (SIGKILL)"}]
    ended = [{"event": "exit", "of": 5, "code": -9, "expected": True}]
    epoch = [{"event": "epoch", "epoch": 1, "members": [0, 1, 2], "owners": [0, 1, 2], "shadows": [[], [], []]}]
    history = made_history([*started, *waits, *epoch, *lost, *ended])
    states = {each.worker: each.state for each in status_of_history("run", history).workers}
    assert states == {3: "waiting", 4: "starting", 5: "dead"}


def test_a_status_tells_who_waits_for_memory() -> None:
    started: list[dict[str, Any]] = [
        {"event": "started", "of": worker, "child": worker + 9, "slots": []} for worker in (3, 4, 5)
    ]
    why = "keeps waiting: one block takes 2 MB, and it has 1 MB"
    cramped = [{"event": "cramped", "of": worker, "why": why} for worker in (3, 4, 5)]
    later = [{"event": "cramped", "of": 4, "why": ""}, {"event": "exit", "of": 5, "code": -9, "expected": True}]
    assert status_of_history("run", made_history([*started, *cramped, *later])).policy == (f"worker 3 {why}",)


def test_workers_that_were_started_again_are_shown_once_by_their_last_process() -> None:
    """All workers begin again from a checkpoint: each was listed twice, and a live one was said to be dead."""
    again = [
        event("exit", of=1, code=-9, expected=False, at_ns=5),
        event("epoch", epoch=2, members=[0], owners=[0, 0], verdict=[[1, "was ended", "death"]], at_ns=6),
        event("waiting", of=1, lost="left while waiting", at_ns=6),
        event("exit", of=0, code=0, expected=True, at_ns=7),
        event("resumed", step=0, at_ns=8),
        event("started", of=0, child=21, slots=[[0, 0]], at_ns=9),
        event("started", of=1, child=22, slots=[[0, 1]], at_ns=9),
    ]
    begun = status_of_history("mine", made_history([*TRAINED, *again]))
    assert [(each.worker, each.pid, each.state) for each in begun.workers] == [(0, 21, "in"), (1, 22, "in")]
    formed = event("epoch", epoch=3, members=[0, 1], owners=[0, 1], at_ns=10)
    ended = event("exit", of=0, code=0, expected=True, at_ns=11)
    found = status_of_history(
        "mine", made_history([*TRAINED, *again, formed, event("finished", of=0, at_ns=10), ended])
    )
    assert [(each.now, each.before, each.state) for each in found.workers] == [
        (((0, 0),), (), "finished"),
        (((0, 1),), (), "in"),
    ]


def test_a_status_shows_itself_in_a_line() -> None:
    workers = (WorkerStatus(0, 7, "", ((0, 0),)), WorkerStatus(1, 8, "", (), state="out"))
    status = RunStatus("mine", "running", 1, 4, 9, workers, loss=0.5)
    assert repr(status) == "<RunStatus mine: running, step 5 of 9, loss 0.5000, 1 of 2 workers at work>"
