"""What the clock says of workers: silence and endless actions convict, waiting does not."""

from __future__ import annotations

from typing import Any

import pytest

from engine.codec.documents import state_of, state_text
from engine.core.exclusion import Cause, Exclusion, Position, Verdict, excluded
from engine.core.messages import HeartbeatMessage
from engine.core.protocol.events import ExitSeen, HostWord, Loading, Sight, Takeover, Tick, WorkerWord
from engine.core.protocol.failure_detector import last_seen, unresponsive
from engine.core.protocol.state import Options, Phase, State
from tests.core.membership_cases import JOINED, S, beats, committed, forming, is_done, running, told
from tests.looped import looped


def numbers(verdict: Verdict) -> set[int]:
    """Returns the workers that a verdict names."""
    return {each.worker for each in verdict}


def beating(state: State, until_s: int, *still: tuple[int, HeartbeatMessage]) -> State:
    """Returns a job after ticks and heartbeats four times a second: `still` repeat themselves, the others wait."""
    stuck = dict(still)
    for now_ns in range(state.ticked_ns + S // 4, until_s * S + 1, S // 4):
        for worker in state.members:
            beat = stuck.get(worker, HeartbeatMessage(state.epoch, 0, 3, inside=False))
            state = told(state, WorkerWord(now_ns, worker, beat))
        state = told(state, Tick(now_ns))
    return state


def test_a_waiting_worker_is_never_suspected() -> None:
    state = beating(running(), 59)
    assert (state.epoch, unresponsive(state, 59 * S)) == (1, ())


def test_a_worker_inside_an_action_beyond_the_deadline_is_out() -> None:
    inside = (1, HeartbeatMessage(1, 0, 4, inside=True))
    assert beating(running(), 30, inside).epoch == 1
    state = beating(running(), 31, inside)
    why = "hangs for 30.2 s (limit 30.0 s), in an action of step 0"
    assert state.verdict == (Exclusion(1, why, Cause.HANG, Position(0, 4, waiting=False), S // 4),)
    assert state.verdict[0].how == "hangs for 30.2 s (limit 30.0 s)"


class Looks:
    """A running job of which worker 1 is inside action 4; all workers answer and are looked at four times a second."""

    def __init__(self, slowest_ns: int = S // 50):
        self.state = told(running(), *(beats(3, worker, 1, 0, 3, inside=False) for worker in range(3)))
        self.slowest_ns = slowest_ns
        self.now_ns = self.entered_ns = 3
        self.ran_ns = self.worked_ns = 0

    def until(self, end_ns: int, *, runs: bool = False, works: bool = False, answers: bool = True, **seen: Any) -> int:
        """Returns the time at which a worker is out, or `end_ns` if none is."""
        while self.now_ns < end_ns and self.state.epoch == 1:
            self.now_ns += S // 4
            self.ran_ns += runs * S // 9
            self.worked_ns += (runs or works) * S // 9
            for worker in [0, 2, *[1] * answers]:
                self.state = told(self.state, beats(self.now_ns, worker, 1, 0, 3, inside=False))
            inside_ns, times = self.now_ns - self.entered_ns, (self.ran_ns, self.worked_ns)
            place = {"inside": True, "inside_ns": inside_ns, "loading": Loading.NONE, "state": "S", **seen}
            sight = Sight(1, 0, 4, slowest_ns=self.slowest_ns, thread_ns=times[0], process_ns=times[1], **place)
            self.state = told(self.state, Tick(self.now_ns, {1: sight}))
        return self.now_ns


@looped(
    ("slowest_s", "seen", "out_s"),
    [
        (0.02, {}, 1.5),  # it sleeps, or waits for a lock
        (0.02, {"answers": False}, 1.5),  # the same with Python's lock in its hand
        (0.3, {}, 3.5),
        (0.0, {}, 30.25),  # its first action
        (0.02, {"runs": True}, 5.25),
        (0.02, {"state": "R"}, 5.25),  # it waits for a core
        (0.02, {"works": True, "answers": False}, 5.25),  # another thread runs, with Python's lock
        (0.02, {"works": True}, 1.5),  # another thread runs, without it
        (0.3, {"runs": True}, 15.25),
        (0.02, {"state": "T", "answers": False}, 5.25),
        (0.02, {"loading": Loading.AHEAD}, 1.5),
        (0.02, {"loading": Loading.AHEAD, "state": "T", "answers": False}, 5.25),
    ],
)
def test_evidence_tells_a_hang_from_work(slowest_s: float, seen: dict[str, Any], out_s: float) -> None:
    looks = Looks(round(slowest_s * S))
    assert 0 <= out_s * S + 3 - looks.until(60 * S, **seen) <= S // 2
    assert numbers(looks.state.verdict) == {1}


@looped(
    "seen",
    [
        {"loading": Loading.MAIN},  # slow storage
        {"loading": Loading.MAIN, "answers": False},  # the same, read with Python's lock in the hand
        {"loading": Loading.MAIN, "answers": False, "runs": True},  # a tokenizer
        {"loading": Loading.MAIN, "inside": False},
        {"loading": Loading.AHEAD, "answers": False, "works": True},  # a tokenizer in another thread
        {"loading": Loading.AHEAD, "answers": False},
    ],
)
def test_a_worker_that_loads_data_is_never_out_and_no_standstill(seen: dict[str, Any]) -> None:
    looks = Looks()
    looks.until(70 * S, **seen)
    assert looks.state.epoch == 1


def test_the_verdict_names_the_gpu_whose_kernel_does_not_end() -> None:
    gpu = "GPU 1 (NVIDIA H100)"
    state = beating(running(), 31, (1, HeartbeatMessage(1, 0, 4, inside=True, device=gpu)))
    how = f"hangs in a kernel of {gpu} for 30.2 s (limit 30.0 s)"
    assert (state.verdict[0].how, state.verdict[0].why) == (how, f"{how}, in an action of step 0")
    looks = Looks()
    looks.state = told(looks.state, WorkerWord(4, 1, HeartbeatMessage(1, 0, 4, inside=True, device=gpu)))
    assert looks.state.sightings[1].device == gpu
    looks.until(4 * S, answers=False)
    assert looks.state.verdict[0].how.startswith(f"hangs in a kernel of {gpu} for 1")


@pytest.mark.parametrize("number", [4, 5])
def test_a_gpu_that_has_ended_its_work_since_is_not_named(number: int) -> None:
    first = WorkerWord(4, 1, HeartbeatMessage(1, 0, 4, inside=True, device="GPU 1"))
    state = told(running(), first, beats(5, 1, 1, 0, number, inside=True))
    assert state.sightings[1].device == ""
    looks = Looks()
    looks.state = told(looks.state, WorkerWord(4, 1, HeartbeatMessage(1, 0, 3, inside=True, device="GPU 1")))
    looks.until(S, answers=False)
    assert looks.state.sightings[1].device == "", "it has been seen at a later action"


def test_after_a_stop_the_time_inside_an_action_begins_again() -> None:
    looks = Looks()
    looks.until(5 * S - S // 4, state="T", answers=False)
    assert looks.until(9 * S, runs=True) >= 9 * S
    assert looks.state.epoch == 1


def test_a_silent_worker_that_runs_is_waited_for_longer() -> None:
    looks = Looks()
    assert 25 * S < looks.until(60 * S, inside=False, runs=True, answers=False) <= 25.5 * S
    assert {each.cause for each in looks.state.verdict} == {Cause.SILENCE}


def test_the_deadline_adapts_to_slow_actions_and_back() -> None:
    """A worker spends 20 s inside action 1 of step 0 and is quick in all others."""
    quick = [beats(20 * S + index, 0, 1, 0, index, inside=True) for index in range(2, 40)]
    state = told(running(), beats(2, 0, 1, 0, 1, inside=True), *quick)
    for step in (1, 2, 3):
        state = told(state, beats((20 + step) * S, 0, 1, step, 0, inside=True))
        allowed_s = 199 if step == 1 else 30  # the slowest counts in its own step and the next
        awake = state._replace(sightings={0: state.sightings[0]._replace(heard_ns=(20 + step + allowed_s) * S)})
        assert unresponsive(awake, (20 + step + allowed_s) * S) == ()
        assert numbers(unresponsive(awake, (20 + step + allowed_s + 2) * S)) == {0}


def test_time_spent_waiting_is_no_slow_action() -> None:
    state = told(running(), beats(S, 0, 1, 0, 1, True), beats(2 * S, 0, 1, 0, 1, False))
    state = told(state, beats(50 * S, 0, 1, 0, 2, True))
    assert state.sightings[0].slowest_ns == S


def test_a_silent_worker_is_out() -> None:
    state = told(running(), beats(S, 1, 1, 0, 4, inside=False))
    how = "has been silent for 6.0 s"
    assert unresponsive(state, 6 * S) == tuple(excluded(worker, Cause.SILENCE, how, None, worker) for worker in (0, 2))
    late = unresponsive(state, 7 * S)[1]
    assert late == excluded(1, Cause.SILENCE, how, Position(0, 4, waiting=True), S)
    assert (late.why, late.how) == (f"{how}, while it waited in step 0", how)


def test_whoever_is_done_may_be_silent() -> None:
    state = told(committed(running(last_step=0)), is_done(30, 1, 1))
    assert numbers(unresponsive(state, 60 * S)) == {0, 2}


def test_when_every_step_is_committed_nobody_waits_as_long_as_for_a_step() -> None:
    """Without redundancy a job waits long for its workers, of which it cannot lose one; after the end it can."""
    patient = Options(stages=3, redundant=False, silence_ns=60 * S, hang_ns=600 * S, stall_ns=600 * S)
    state = running(redundant=False, last_step=0)._replace(options=patient)
    assert unresponsive(state, 59 * S) == ()
    assert numbers(unresponsive(committed(state), 6 * S)) == {0, 1, 2}
    inside = told(state, *(beats(20, worker, 1, 0, 9, inside=worker == 1) for worker in range(3)))
    for now_ns in range(S // 4, 40 * S + 1, S // 4):
        all_beat = [beats(now_ns, worker, 1, 0, 9, inside=worker == 1) for worker in range(3)]
        inside = told(inside, *all_beat, Tick(now_ns))
    assert unresponsive(inside, 40 * S) == ()
    assert numbers(unresponsive(committed(inside), 40 * S)) == {1}


def test_nobody_is_silent_for_ever_before_it_says_a_word() -> None:
    state = told(forming(), *(Tick(now_ns) for now_ns in range(0, 60 * S, S // 4)))
    assert state.phase is Phase.FORMING
    assert told(state, Tick(60 * S)).phase is Phase.HALTED


def test_whoever_is_done_moves_nothing() -> None:
    """A history found this: a worker that spun after it was done kept the others' standstill from being seen."""
    state = told(committed(running(last_step=0)), is_done(30, 1, 1))
    assert told(state, beats(40, 1, 1, 1, 0, inside=True)).moved_ns == 30
    assert told(state, beats(40, 0, 1, 1, 0, inside=True)).moved_ns == 40


def test_a_heartbeat_that_comes_late_is_a_sign_of_life_and_no_more() -> None:
    state = told(running(), beats(S, 0, 1, 2, 5, inside=True), beats(2 * S, 0, 1, 2, 4, inside=False))
    seen = state.sightings[0]
    assert (seen.heard_ns, seen.since_ns, seen.at) == (2 * S, S, (1, 2, 5, False))
    assert last_seen(state, 0) == Position(2, 5, waiting=False)


def test_a_coordinator_that_slept_judges_nobody() -> None:
    state = beating(running(), 3)
    state = told(state, Tick(500 * S))
    assert (state.epoch, unresponsive(state, 500 * S)) == (1, ())
    assert beating(state, 520).epoch == 1


def test_silence_before_a_sleep_of_the_coordinator_does_not_count_behind_it() -> None:
    """The worker slept too, as in a paused container, and has had no time to answer."""
    state = running()
    limit_ns = state.options.silence_ns
    for now_ns in range(S // 4, limit_ns, S // 4):
        state = told(state, *(beats(now_ns, worker, 1, 0, 3, inside=False) for worker in (0, 2)), Tick(now_ns))
    woken_ns = limit_ns + 500 * S
    for now_ns in range(woken_ns, woken_ns + limit_ns - S // 4, S // 4):
        state = told(state, *(beats(now_ns, worker, 1, 0, 3, inside=False) for worker in (0, 2)), Tick(now_ns))
    assert state.epoch == 1, "nobody is judged before it was silent for as long again"


def test_a_worker_from_whose_host_nothing_comes_is_not_judged_before_something_comes_again() -> None:
    sight = Sight(1, 0, 4, True, S // 2, S // 50, Loading.NONE, "S", 0, 0)  # the last one: it was inside an action
    state = told(running(), *(beats(3, worker, 1, 0, 3, inside=False) for worker in range(3)), Tick(S // 4, {1: sight}))
    judged = state
    for now_ns in range(S // 2, 20 * S, S // 4):
        answers = [beats(now_ns, worker, 1, 0, 3, inside=False) for worker in (0, 2)]
        state = told(state, *answers, Tick(now_ns, {}, unseen=(1,)))
        judged = told(judged, *answers, Tick(now_ns)) if judged.epoch == 1 else judged
    assert (state.epoch, state.verdict) == (1, ())
    assert numbers(judged.verdict) == {1}, "else it hangs"
    for now_ns in range(20 * S, 30 * S, S // 4):
        state = told(state, *(beats(now_ns, worker, 1, 0, 3, inside=False) for worker in (0, 2)), Tick(now_ns))
        if state.epoch > 1:
            break
    assert numbers(state.verdict) == {1}
    assert 20 * S < now_ns < 26 * S


def test_no_edge_to_a_worker_is_dark_while_nothing_comes_from_its_host() -> None:
    state = running()
    for now_ns in range(S // 4, 20 * S, S // 4):
        counts = {0: ((1, 7, 7, 7),), 1: ((0, 7, 8, 6),), 2: ()}
        for worker in (0, 2):
            beat = HeartbeatMessage(1, 0, 3, False, now_ns, ((1, 7, 8, 6), *counts[worker]))
            state = told(state, WorkerWord(now_ns, worker, beat))
        if now_ns <= S // 4:
            state = told(
                state, WorkerWord(now_ns, 1, HeartbeatMessage(1, 0, 3, False, 9 * S, ((0, 7, 8, 6), (2, 7, 8, 6))))
            )
        state = told(state, Tick(now_ns, {}, unseen=(1,)))
    assert (state.epoch, state.verdict) == (1, ())


def words(*ages_ns: int) -> dict[int, HostWord]:
    return {worker: HostWord(age_ns) for worker, age_ns in enumerate(ages_ns)}


def test_the_silence_of_a_worker_on_another_host_is_what_its_agent_has_seen() -> None:
    state = running()
    limit_ns = state.options.silence_ns
    for now_ns in range(S // 4, 20 * S, S // 4):  # the words come rarely, and each tick has the last ones
        state = told(state, Tick(now_ns, words=words(0, limit_ns - 1, 0)))
    assert (state.epoch, state.verdict) == (1, ())
    state = told(state, Tick(20 * S, words=words(0, limit_ns + S, 0)))
    (out,) = state.verdict
    assert (out.worker, out.cause) == (1, Cause.SILENCE)
    assert f"silent for {(limit_ns + S) / S:.1f} s" in out.how


def test_one_tick_takes_the_heartbeats_of_all_workers_of_other_hosts() -> None:
    beat = HeartbeatMessage(1, 0, 4, inside=True)
    given = {worker: HostWord(S // 10, beat) for worker in range(3)} | {7: HostWord(0)}
    state = told(running(), *(Tick(now_ns) for now_ns in range(S // 4, S, S // 4)), Tick(S, words=given))
    assert {worker: seen.at for worker, seen in state.sightings.items()} == dict.fromkeys(range(3), (1, 0, 4, False))
    assert {seen.heard_ns for seen in state.sightings.values()} == {S - S // 10}


@looped("stop_ms", [100, 400, 700, 1000, 1500, 2400, 5000, 60_000])
def test_a_pause_of_all_processes_puts_nobody_out(stop_ms: int) -> None:
    """Half a second before it, worker 1 came into an action in which it does not run; it runs again soon after it."""
    looks = Looks()
    looks.until(S // 2)
    looks.now_ns += stop_ms * S // 1000
    looks.until(looks.now_ns + S // 4)
    looks.until(looks.now_ns + 4 * S, runs=True)
    assert (looks.state.epoch, looks.state.verdict) == (1, ())


def test_a_look_that_is_always_late_still_finds_a_hang() -> None:
    looks = Looks()
    for _ in range(20):
        looks.now_ns += S // 2
        looks.until(looks.now_ns + S // 4)
    assert numbers(looks.state.verdict) == {1}


def test_what_a_coordinator_is_told_again_counts_from_its_take_over() -> None:
    """The joins, and the input whose answer was missing, have the times at which the one before heard them."""
    begun_ns = 100 * S
    state = told(state_of(state_text(running()), begun_ns), Takeover(begun_ns), *JOINED, Tick(40 * S, {}))
    assert {seen.heard_ns for seen in state.sightings.values()} == {begun_ns}
    assert beating(state, 103).epoch == 2
    state = told(state_of(state_text(running()), begun_ns), Takeover(begun_ns), ExitSeen(40 * S, 2, -9))
    assert numbers(beating(state, 109).verdict) == {2}, "the others have ten seconds for their inventories"


def test_a_report_of_quiet_counts_as_long_as_it_was_watched() -> None:
    """After a pause of all processes, each has been quiet for as long as it lasted."""
    state = told(running(), Tick(S // 4), Tick(20 * S))
    for worker in range(3):
        counts = tuple((peer, 7, 8, 6) for peer in range(3) if peer != worker)
        state = told(state, WorkerWord(20 * S + 1, worker, HeartbeatMessage(1, 0, 3, False, 20 * S, counts)))
    assert told(state, Tick(20 * S + S // 4)).epoch == 1


def test_the_age_of_a_word_of_another_host_counts_as_far_as_it_was_watched() -> None:
    state = told(running(), Tick(S // 4), Tick(20 * S))
    assert told(state, Tick(20 * S + S // 4, words=words(20 * S, 20 * S, 20 * S))).epoch == 1
