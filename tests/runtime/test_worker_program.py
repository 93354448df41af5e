"""What a worker knows of its share before the first action."""

from __future__ import annotations

from engine.core.ownership import Grid, fresh, with_shadows
from engine.core.program.build import build_program
from engine.runtime.transport.transfers import worker_program


def test_the_others_wait_for_the_first_stage_and_for_nobody_else() -> None:
    """The last worker shadows the first stage: its redundant forwards nobody waits for, though they come first too."""
    ownership = with_shadows(fresh(Grid(3, 4)), "eager", 1, range(3))
    program = build_program("1f1b", ownership, "eager")
    assert [str(program[worker][0]) for worker in (0, 2)] == ["0F0", "0F0"]
    worker_programs = [worker_program(worker, program, ownership, [()] * 3) for worker in range(3)]
    assert [worker_program.is_awaited for worker_program in worker_programs] == [True, False, False]


def test_who_has_to_send_a_state_first_has_its_receives_posted_before() -> None:
    ownership = with_shadows(fresh(Grid(2, 4)), "lazy", 1, range(2))
    program = build_program("1f1b", ownership, "lazy", healing={(0, (0, 1))})
    assert str(program[1][0]) == "1HEAL"
    assert not worker_program(1, program, ownership, [()] * 2).is_awaited
