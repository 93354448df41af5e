"""Costs that are read off events: a dry run with them predicts the run that the events come from, but not its waits."""

from __future__ import annotations

import pytest

from engine.bench.figures.costs import Done, Iteration, lasting, predicted_seconds
from engine.bench.figures.schedules import schedule_jobs, timed_program
from engine.core.action import RECEIVE_OPS, Action, Op
from engine.core.config.job_wants import fresh_ownership
from engine.core.ownership import Ownership
from engine.core.program.build import Program
from engine.core.program.dry_run import DryRun, dry_run
from tests.core.drawing import program_of

MS = 1_000_000
LATENCY = MS // 4
COSTS = {Op.F: 10 * MS, Op.B: 20 * MS, Op.I: 9 * MS, Op.W: 11 * MS, Op.SEND_F: 2 * MS, Op.SEND_B: MS}


def cost(action: Action) -> float:
    """Costs more on later stages; a receive is the same everywhere."""
    return MS / 2 if action.op in RECEIVE_OPS else COSTS[action.op] * (1 + action.stage / 10)


def done_in(run: DryRun) -> dict[int, list[Done]]:
    """Returns what each worker has run; what a receive waits for is a part of it."""
    done: dict[int, list[Done]] = {}
    for start, end, worker, action in run.spans:
        line = done.setdefault(worker, [])
        before_ns = line[-1].end_ns if line else 0
        line.append(Done(action, before_ns if action.op in RECEIVE_OPS else int(start), int(end)))
    return done


def of_case(case: str) -> tuple[Program, Ownership, Iteration, Iteration]:
    """Returns the program of a case, and what its workers run of it, in full and of the first microbatch alone."""
    job = schedule_jobs()[case]
    ownership = fresh_ownership(job)
    programs = timed_program(job, ownership), timed_program(job, ownership, lone=True)
    full, alone = (done_in(dry_run(program, ownership, cost, latency=LATENCY)) for program in programs)
    return programs[0], ownership, full, alone


@pytest.mark.parametrize("case", [name for name in schedule_jobs() if "overlapped" not in name])
def test_the_run_that_the_costs_come_from_is_predicted(case: str) -> None:
    program, ownership, done, alone = of_case(case)
    seconds = predicted_seconds(program, ownership, done, alone)
    assert seconds == pytest.approx(max(line[-1].end_ns for line in done.values()) / 1e9, rel=1e-6)


def test_how_long_anybody_waited_or_the_iteration_took_changes_nothing() -> None:
    program, ownership, done, alone = of_case("1f1b P=4 V=1 M=8")
    assert [str(each.action) for each in done[0][-2:]] == ["0RECV_B7", "0B7"]
    receive, backward = done[0][-2:]
    receive = receive._replace(end_ns=receive.end_ns + 10**9)
    backward = backward._replace(start_ns=backward.start_ns + 10**9, end_ns=backward.end_ns + 10**9)
    late = {**done, 0: [*done[0][:-2], receive, backward]}
    assert predicted_seconds(program, ownership, late, alone) == predicted_seconds(program, ownership, done, alone)


def test_a_transfer_that_nobody_waited_for_tells_nothing_of_how_long_it_was_under_way() -> None:
    program, ownership, done, alone = of_case("1f1b P=4 V=1 M=8")
    (place,) = (place for place, each in enumerate(alone[0]) if str(each.action) == "0RECV_B0")
    receive = alone[0][place]
    later = receive._replace(start_ns=receive.end_ns + 10**8, end_ns=receive.end_ns + 10**8 + MS)
    late = {**alone, 0: [*alone[0][:place], later, *alone[0][place + 1 :]]}
    assert predicted_seconds(program, ownership, done, late) == pytest.approx(
        predicted_seconds(program, ownership, done, alone)
    )


def test_pairs_that_run_at_once_cost_the_longer_of_the_two() -> None:
    program, ownership, done, alone = of_case("dualpipev-overlapped P=4 V=2 M=8")
    seconds = predicted_seconds(program, ownership, done, alone, overlapping=True)
    run = dry_run(program, ownership, cost, overlapping=True, latency=LATENCY)
    assert seconds == pytest.approx(run.makespan / 1e9, rel=1e-6)


def test_an_action_lasts_until_the_next_begins_unless_they_run_at_once() -> None:
    forward, backward, send = program_of("0: 0F1 1B0 0SEND_F1")[0]
    done = [Done(forward, 1, 10), Done(backward, 0, 20), Done(send, 22, 23)]
    assert lasting(done, 25) == [Done(forward, 1, 10), Done(backward, 0, 22), Done(send, 22, 25)]
