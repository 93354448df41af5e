"""The machine of a host agent: deadlines, SIGKILL, and the processes that stay."""

from __future__ import annotations

from math import inf
from typing import Any

from engine.core.hosts import ends
from engine.core.hosts.ends import (
    GONE_NS,
    STOP_NS,
    EndStep,
    HostAgent,
    HostOutput,
    KillWorker,
    LeaveBehind,
    StopWorkers,
)

S = 1_000_000_000
LATE, BY_SIGNAL = "it did not end before its deadline", "the run was interrupted"
HOST = HostAgent(frozenset((0, 1, 2)))


def given(host: HostAgent, *inputs: tuple[Any, ...]) -> tuple[HostAgent, tuple[HostOutput, ...]]:
    """Returns the agent after some inputs, each with its rule, and the outputs of the last one."""
    outputs: tuple[HostOutput, ...] = ()
    for rule, *values in inputs:
        host, outputs = rule(host, *values)
    return host, outputs


def kills(why: str, *workers: int) -> tuple[KillWorker, ...]:
    return tuple(KillWorker(worker, why) for worker in workers)


def test_a_worker_that_is_put_out_is_killed_once_and_named_after_ten_seconds_if_it_stays() -> None:
    host, outputs = given(HOST, (ends.kill, 0, 1))
    assert outputs == kills("", 1)
    assert given(host, (ends.kill, S, 1))[1] == ()
    assert host.due_ns == GONE_NS == 10 * S
    assert given(host, (ends.read_clock, GONE_NS - 1))[1] == ()
    host, outputs = given(host, (ends.read_clock, GONE_NS))
    assert outputs == (LeaveBehind(1),)
    assert (set(host.left), host.is_stopping, host.due_ns) == ({1}, False, inf), "training goes on"
    assert given(host, (ends.read_clock, 20 * S))[1] == ()


def test_a_worker_that_ends_by_sigkill_is_not_named() -> None:
    host, outputs = given(HOST, (ends.kill, 0, 1), (ends.see_end, S, 1), (ends.read_clock, GONE_NS))
    assert (outputs, host.due_ns) == ((), inf)
    assert given(host, (ends.kill, 11 * S, 1))[1] == ()


def test_a_stop_is_told_once_and_then_all_that_live_are_killed_and_named() -> None:
    host, outputs = given(HOST, (ends.stop, 0))
    assert outputs == (StopWorkers(),)
    assert given(host, (ends.stop, S))[1] == ()
    host, outputs = given(host, (ends.see_end, S, 0), (ends.read_clock, STOP_NS))
    assert outputs == kills(LATE, 1, 2)
    host, outputs = given(host, (ends.see_end, 4 * S, 2), (ends.read_clock, STOP_NS + GONE_NS))
    assert outputs == (LeaveBehind(1),)


def test_a_worker_that_was_killed_before_the_end_has_its_own_ten_seconds() -> None:
    host, outputs = given(HOST, (ends.kill, 0, 1), (ends.stop, 8 * S), (ends.read_clock, GONE_NS))
    assert outputs == (LeaveBehind(1),)
    assert given(host, (ends.read_clock, 11 * S))[1] == kills(LATE, 0, 2)


def test_workers_that_do_not_leave_are_stopped_and_then_killed() -> None:
    host, outputs = given(HOST, (ends.let_end, 0, 2 * S), (ends.read_clock, 2 * S))
    assert outputs == (StopWorkers(),)
    assert given(host, (ends.read_clock, 5 * S))[1] == kills(LATE, 0, 1, 2)


def test_a_signal_ends_the_step_and_a_second_one_kills() -> None:
    host, outputs = given(HOST, (ends.interrupt, 0, S, True))
    assert (outputs, host.deadline_ns) == ((EndStep(S),), S)
    again, outputs = given(host, (ends.interrupt, 5, S, True))
    assert outputs == (StopWorkers(), *kills(BY_SIGNAL, 0, 1, 2))
    assert given(again, (ends.interrupt, 6, S, True))[1] == ()


def test_a_step_that_outlasts_the_patience_of_a_signal_leaves_time_to_keep_the_last_one() -> None:
    """The workers were killed with the state of all committed steps in their hands."""
    host, outputs = given(HOST, (ends.interrupt, 0, S, True), (ends.read_clock, S))
    assert (outputs, host.deadline_ns) == ((StopWorkers(),), S + ends.LAST_NS)
    assert given(host, (ends.read_clock, S + ends.LAST_NS))[1] == kills(BY_SIGNAL, 0, 1, 2)
    assert given(host, (ends.interrupt, S + 1, S, True))[1] == kills(BY_SIGNAL, 0, 1, 2)
    host, _ = given(HOST, (ends.interrupt, 0, S, True, ends.TERM_NS), (ends.read_clock, S))
    assert host.deadline_ns == S + ends.TERM_NS < 10 * S


def test_a_signal_before_training_stops_at_once_and_no_stop_moves_its_deadline() -> None:
    host, outputs = given(HOST, (ends.interrupt, 0, S // 4, False))
    assert (outputs, host.deadline_ns) == ((StopWorkers(),), S // 4)
    host, _ = given(HOST, (ends.interrupt, 0, S, True), (ends.stop, 5))
    assert host.deadline_ns == S
