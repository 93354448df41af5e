"""Receives moved ahead: every schedule then runs where sends block, and 1F1B without it does not."""

from __future__ import annotations

import pytest

from engine.core.errors import DeadlockError
from engine.core.ownership import Grid, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.early_receive_pass import with_early_receives
from engine.core.program.transfer_pass import with_transfers
from engine.core.program.verify import verify
from engine.core.schedules.registry import SCHEDULES
from engine.core.value import Kind, Value
from tests.core.drawing import drawn_program, plain, program_of
from tests.core.machine import drawn_by
from tests.core.random_programs import random_ownership


def test_a_send_that_blocks_waits_for_its_receive() -> None:
    ownership = fresh(Grid(2, 2))
    held = [(1, Value(Kind.ACTIVATION, 0, 0, 1))]
    busy = program_of("0: 0F0 0SEND_F0 0F1\n1: 1f1 1f1 1f1 1RECV_F0")
    assert dry_run(busy, ownership, held=held).makespan == 3
    assert [(each.start, each.end) for each in dry_run(busy, ownership, held=held, blocking=True).spans] == [
        *((0, 1), (0, 1), (1, 2), (2, 3)),
        *((3, 3), (3, 4), (3, 3)),
    ]
    crosswise = program_of("0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0\n1: 1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1")
    assert dry_run(crosswise, ownership).makespan == 4
    with pytest.raises(DeadlockError) as refused:
        dry_run(crosswise, ownership, blocking=True)
    assert refused.value.cycle == ((0, "0SEND_F1"), (1, "1SEND_B0"), (0, "0SEND_F1"))


def test_the_receive_stands_where_its_taker_has_come_to() -> None:
    ownership = fresh(Grid(2, 3))
    program = with_transfers(
        program_of("0: 0F0 0F1 0B0 0F2 0B1 0B2\n1: 1F0 1B0 1F1 1B1 1F2 1B2"), ownership
    )  # fmt: skip
    assert drawn_program(with_early_receives(program)) == plain(
        """
        0: 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0F2 0RECV_B1 0SEND_F2 0B1 0RECV_B2 0B2
        1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1 1RECV_F2 1F2 1B2 1SEND_B2
        """
    )


@pytest.mark.parametrize("pipelines", [1, 2])
@pytest.mark.parametrize("workers", [2, 3, 8])
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_runs_where_sends_block(name: str, workers: int, pipelines: int) -> None:
    schedule = SCHEDULES[name]
    for v in {schedule.stages_per_worker[0], min(3, schedule.stages_per_worker[1])}:
        for microbatches in (schedule.least_microbatches(workers), 2 * workers + 3):
            ownership = fresh(Grid(workers * v, microbatches, pipelines), v, schedule.placement)
            ownership = with_shadows(ownership, "eager", 1, ownership.workers())
            program = build_program(name, ownership, "eager", blocking=True)
            assert verify(program, ownership, blocking=True) == ()
            assert verify(program, ownership) == ()
            plainly = build_program(name, ownership, "eager")
            assert {worker: sorted(actions) for worker, actions in program.items()} == {
                worker: sorted(actions) for worker, actions in plainly.items()
            }


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gpipe"])
def test_without_it_they_do_not(name: str) -> None:
    schedule = SCHEDULES[name]
    v = max(2, schedule.stages_per_worker[0]) if schedule.takes(2) else 1
    ownership = fresh(Grid(4 * v, 8), v, schedule.placement)
    (violation,) = verify(build_program(name, ownership), ownership, blocking=True)
    assert "deadlock" in violation.rule
    assert "SEND" in violation.rule


def test_nor_does_any_other_ownership_matter() -> None:
    order = drawn_by(3)
    for _ in range(200):
        ownership = random_ownership(order)
        program = build_program("1f1b", ownership, blocking=True)
        assert verify(program, ownership, blocking=True) == ()


def test_what_cannot_go_on_comes_back_as_it_is() -> None:
    stuck = program_of("0: 0F0 0RECV_B0 0B0 0SEND_F0\n1: 1RECV_F0 1F0 1B0 1SEND_B0")
    assert with_early_receives(stuck) == stuck
