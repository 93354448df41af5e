"""Leaving: the coordinator says at once how a notice is honoured, and carries it out when its time comes."""

from __future__ import annotations

from engine.core.history.process_records import WayOutRecord
from engine.core.history.run_records import NoticeRecord, StaysRecord
from engine.core.messages import EpochMessage, WaitingMessage
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.events import Notice, WorkerWord
from engine.core.protocol.inputs_outputs import ClockTick, Kill, Note, ProcessExit, Write
from tests.core.coordinator_cases import S, answers, committed, given, told, training, written


def in_a_step(*durations_s: int) -> CoordinatorState:
    """Returns a job in its second step, after steps of these durations; time stands at 20 ns."""
    state, _ = committed(training())
    return state._replace(membership=state.membership._replace(steps_ns=tuple(each * S for each in durations_s)))


def test_a_notice_that_does_not_suffice_for_the_boundary_is_honoured_inside_the_step() -> None:
    state = in_a_step(2)
    now_ns = state.membership.committed_ns
    state, outputs = given(state, Notice(now_ns, 2, S))
    short = "the next step boundary is about 2.2 s away, and 1.0 s are left"
    inside = WayOutRecord(of=2, way="inside", step=1, text=f"hands over inside step 1: {short}")
    assert written(outputs)[:2] == [NoticeRecord(of=2, grace_s=1.0), inside]
    (epoch,) = [each for each in told(outputs) if isinstance(each, EpochMessage)]
    assert (epoch.members.runs, epoch.gather, epoch.regroup) == (((0, 2),), True, True)
    known = state.membership
    assert (known.reason, known.owners, known.verdict) == ("worker 2 hands over inside step 1", (0, 1, 1), ())
    assert 2 in known.shadows[2], "it is a shadow until it leaves"
    state, _ = given(state, *answers(state))
    assert given(state, ClockTick(now_ns + S // 4))[0].membership.members == (0, 1, 2)
    state, outputs = given(state, ClockTick(now_ns + S // 2))
    (epoch,) = [each for each in told(outputs) if isinstance(each, EpochMessage)]
    assert epoch.members.runs == ((0, 1),)
    assert state.membership.reason == "worker 2 has left inside step 1"
    assert not [each for each in outputs if isinstance(each, Kill)], "it leaves by itself"


def test_a_boundary_that_does_not_come_in_time_is_given_up() -> None:
    state = in_a_step(2)
    now_ns = state.membership.committed_ns
    state, outputs = given(state, Notice(now_ns, 2, 3 * S))
    assert [each.way for each in written(outputs) if isinstance(each, WayOutRecord)] == ["boundary"]
    state, outputs = given(state, ClockTick(now_ns + 2 * S))
    assert written(outputs) == []
    state, outputs = given(state, ClockTick(now_ns + 2 * S + S // 2))
    assert [each.way for each in written(outputs) if isinstance(each, WayOutRecord)] == ["inside"]
    assert state.membership.going == (2,)


def test_a_notice_that_nobody_can_honour_is_said_once() -> None:
    state = in_a_step(2)
    now_ns = state.membership.committed_ns
    state, outputs = given(state, Notice(now_ns, 2, S // 20))
    short = "the next step boundary is about 2.2 s away, and 0.1 s are left"
    text = f"cannot hand over in time and will count as dead: {short}"
    assert outputs[-2:] == (Write(WayOutRecord(of=2, way="none", step=1, text=text)), Note(f"worker 2 {text}"))
    assert written(given(state, ClockTick(now_ns + S // 100))[1]) == []


def test_a_leaver_that_waits_for_the_wanted_owners_says_so() -> None:
    state = in_a_step(2)
    now_ns = state.membership.committed_ns
    later = " or a few later, when the wanted owners hold its stages"
    for elastic, words in ((True, later), (False, "")):
        asked = state._replace(preparation=state.preparation._replace(elastic=elastic))
        _, outputs = given(asked, Notice(now_ns, 2, 60 * S))
        (said,) = [each for each in written(outputs) if isinstance(each, WayOutRecord)]
        assert said.text == f"hands over at the boundary after step 1{words}"


def test_nobody_is_said_to_stay_while_a_worker_waits_that_can_take_over() -> None:
    """It was said of all members, and it was wrong; without the worker it is said at the next tick."""
    state, _ = given(in_a_step(2), WorkerWord(20, 3, WaitingMessage(joins=True), "host"))
    now_ns = state.membership.committed_ns
    state, outputs = given(state, *(Notice(now_ns, worker, 60 * S) for worker in (0, 1, 2)))
    assert [each.way for each in written(outputs) if isinstance(each, WayOutRecord)] == ["boundary"] * 3
    assert not [each for each in written(outputs) if isinstance(each, StaysRecord)]
    lost, outputs = given(state, ProcessExit(now_ns, 3, -9), ClockTick(now_ns + S))
    stays = [each for each in written(outputs) if isinstance(each, StaysRecord)]
    text = "is to leave within 60 s, but no other worker can take over stage"
    assert stays == [StaysRecord(of=each, text=f"{text} {each}") for each in range(3)]
    assert written(given(lost, ClockTick(now_ns + 2 * S))[1]) == []
    again, _ = given(lost, WorkerWord(now_ns, 4, WaitingMessage(joins=True), "host"), ClockTick(now_ns + 3 * S))
    assert (sorted(lost.staying), sorted(again.staying)) == ([0, 1, 2], [])
