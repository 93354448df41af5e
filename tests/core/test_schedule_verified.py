"""Verification of schedules: no false alarm on thousands of valid programs, and every kind of corruption is named."""

from __future__ import annotations

import random
import re
from functools import cache
from itertools import count

import pytest

from engine.core.action import Program
from engine.core.errors import ScheduleError
from engine.core.ownership import Grid, Ownership, Redundancy, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.dry_run import dry_run
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from tests.core.corruptions import CORRUPTIONS
from tests.core.recovery_cases import seeded
from tests.looped import looped

_WITHOUT_CHOICE: tuple[Redundancy, ...] = ("none", "lazy")  # a redundant forward may be there, or not


def drawn_step(
    order: random.Random, least: int = 1, policies: tuple[Redundancy, ...] = ("none", "lazy", "eager")
) -> tuple[Program, Ownership]:
    """Returns the program of a step of a random small job, of `least` workers and microbatches, and its ownership."""
    name = order.choice(sorted(SCHEDULES))
    schedule = SCHEDULES[name]
    workers = order.randint(least, 3)
    v = order.randint(schedule.stages_per_worker[0], min(3, schedule.stages_per_worker[1]))
    few = max(least, schedule.least_microbatches(workers))
    grid = Grid(workers * v, order.randint(few, max(few, 5)), order.choice((1, 1, 2)))
    redundancy = order.choice(policies)
    ownership = fresh(grid, v, schedule.placement)
    ownership = with_shadows(ownership, redundancy, 1, ownership.workers())
    log_every, copy_time = order.choice((0, 0, 1, 2)), order.choice((None, None, 0.3))
    return build_program(name, ownership, redundancy, log_every=log_every, copy_time=copy_time), ownership


@pytest.mark.timeout(300)
@pytest.mark.parametrize("steps", [250, pytest.param(20_000, marks=pytest.mark.soak)])
def test_no_false_alarm(steps: int) -> None:
    order = seeded(1)
    for _ in range(steps):
        program, ownership = drawn_step(order)
        assert verify(program, ownership) == ()


@cache
def sound_step(number: int) -> tuple[Program, Ownership]:
    """Returns a step to spoil; all kinds of corruption spoil the same ones, and most find a place in few of them."""
    return drawn_step(seeded(number), 2, _WITHOUT_CHOICE)


def test_there_are_many_kinds_of_corruption() -> None:
    assert len(CORRUPTIONS) >= 30


# A whole step hands nothing over: the plans of hand-overs are spoiled in test_plan_verified.py.
@looped("kind", [each for each in CORRUPTIONS if not {"HAND", "SHIP"} & {*each.split()}])
def test_a_corrupted_program_is_refused(kind: str) -> None:
    order, found = seeded(2), 0
    for number in count():
        if found == 12:
            break
        program, ownership = sound_step(number)
        lines = {worker: list(actions) for worker, actions in program.items()}
        if not CORRUPTIONS[kind](lines, ownership, order):
            continue
        spoiled = {worker: tuple(line) for worker, line in lines.items()}
        if spoiled == dict(program):
            continue
        found += 1
        violations = verify(spoiled, ownership)
        assert violations, (kind, spoiled)
        for each in violations:
            assert each.worker in spoiled
            assert each.position < len(spoiled[each.worker])
            assert each.position < 0 or str(spoiled[each.worker][each.position]) == each.action
            assert re.fullmatch(r"worker \d+(, position \d+)?: \S+: .{5,}", str(each))


def test_a_deadlock_is_told_as_a_path() -> None:
    ownership = fresh(Grid(2, 1))
    program = dict(build_program("1f1b", ownership))
    first = [str(each) for each in program[0]]
    order = [first.index(text) for text in ("0RECV_B0", "0F0", "0SEND_F0")]
    program[0] = (*(program[0][at] for at in order), *program[0][3:])
    (violation,) = [each for each in verify(program, ownership) if "deadlock" in each.rule]
    assert str(violation) == (
        "worker 0, position 0: 0RECV_B0: deadlock: worker 0: 0RECV_B0 -> worker 1: 1RECV_F0 -> worker 0: 0RECV_B0"
    )
    with pytest.raises(ScheduleError, match="deadlock"):
        dry_run(program, ownership)
