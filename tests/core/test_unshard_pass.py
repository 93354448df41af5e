"""Shards in programs: each compute action finds its stage whole, no more are than may be, and what breaks that."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.action import COMPUTE_OPS, Action, Op, Program
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.ownership import Grid, Ownership, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.passes import with_unshards
from engine.core.program.schedules import SCHEDULES
from engine.core.program.teams import teams_of
from engine.core.program.verify import verify
from tests.looped import looped

PLACED = ("interleaved", 4, 2)  # schedule, stages, stages of a worker


def built(
    schedule: str, stages: int, stages_per_worker: int, fsdp: int, microbatches: int = 4
) -> tuple[Program, Ownership]:
    grid = Grid(stages, microbatches, pipelines=2, fsdp=fsdp)
    ownership = fresh(grid, stages_per_worker, SCHEDULES[schedule].placement)
    return build_program(schedule, ownership), ownership


def most_whole(actions: tuple[Action, ...]) -> int:
    """Returns how many stages of a worker are whole at once at most."""
    numbers, whole = [0], 0
    for action in actions:
        whole += (action.op is Op.UNSHARD) - (action.op is Op.RESHARD)
        numbers.append(whole)
    assert whole == 0
    return max(numbers)


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 6),
)
def test_every_program_keeps_the_rules(schedule: str, workers: int, per_worker: int, fsdp: int, count: int) -> None:
    known = SCHEDULES[schedule]
    if not known.takes(per_worker):
        per_worker = next(each for each in (1, 2) if known.takes(each))
    microbatches = max(count, known.least_microbatches(workers))
    program, ownership = built(schedule, workers * per_worker, per_worker, fsdp, microbatches)
    assert verify(program, ownership) == ()
    for actions in program.values():
        assert most_whole(actions) <= min(fsdp, per_worker)
    without, _ = built(schedule, workers * per_worker, per_worker, 0, microbatches)
    assert computed(program) == computed(without)


@given(st.integers(1, 3), st.integers(2, 3), st.integers(1, 4), st.data())
def test_pipelines_in_different_orders_gather_all_stages_first(
    stages: int, pipelines: int, microbatches: int, data: st.DataObject
) -> None:
    grid = Grid(stages, microbatches, pipelines, fsdp=1)
    owners = tuple(data.draw(st.integers(0, pipelines * stages - 1)) for _ in grid.slots())
    ownership = with_shadows(Ownership(grid, owners), "lazy", 1, range(pipelines * stages))
    program = build_program("1f1b", ownership, "lazy")
    assert verify(program, ownership) == ()
    for worker, line in program.items():
        own = sorted({stage for _, stage in ownership.slots_of(worker)})
        for op in (Op.UNSHARD, Op.RESHARD):
            found = [each.stage for each in line if each.op is op]
            assert (sorted(found) if teams_of("1f1b", ownership) else found) == own, (
                "runs that are alike have one order"
            )


def computed(program: Program) -> dict[int, list[Action]]:
    return {worker: [each for each in line if each.op in COMPUTE_OPS] for worker, line in program.items()}


def test_as_many_stages_as_may_be_are_whole_ahead_of_their_use() -> None:
    actions = tuple(Action(stage, Op.F, microbatch) for microbatch in range(2) for stage in range(3))
    texts = {most: [str(each) for each in with_unshards({0: actions}, most)[0]] for most in (1, 2, 3)}
    assert texts[1][:6] == ["0UNSHARD", "0F0", "0RESHARD", "1UNSHARD", "1F0", "1RESHARD"]
    assert texts[2][:7] == ["0UNSHARD", "1UNSHARD", "0F0", "0RESHARD", "2UNSHARD", "1F0", "1RESHARD"]
    assert texts[3] == [
        *("0UNSHARD", "1UNSHARD", "2UNSHARD", "0F0", "1F0", "2F0", "0F1"),
        *("0RESHARD", "1F1", "1RESHARD", "2F1", "2RESHARD"),
    ]


@pytest.mark.parametrize(
    ("op", "rule"), [(Op.UNSHARD, "finds its stage in shards"), (Op.RESHARD, "finds its stage whole")]
)
def test_a_missing_action_is_a_broken_rule(op: Op, rule: str) -> None:
    program, ownership = built(*PLACED, fsdp=1)
    line = list(program[0])
    line.remove(next(each for each in line if each.op is op))
    broken = verify({**program, 0: tuple(line)}, ownership)
    assert rule in {each.rule for each in broken}
    assert {each.worker for each in broken} == {0}


def test_owners_that_put_stages_together_in_another_order_wait_for_each_other() -> None:
    program, ownership = built(*PLACED, fsdp=2)
    line = list(program[0])
    first, second = [position for position, each in enumerate(line) if each.op is Op.UNSHARD][:2]
    line[first], line[second] = line[second], line[first]
    (violation,) = verify({**program, 0: tuple(line)}, ownership)
    assert "UNSHARD" in violation.rule


def test_nobody_else_may_put_a_stage_together() -> None:
    program, ownership = built(*PLACED, fsdp=1)
    foreign = Action(1, Op.UNSHARD)
    (violation,) = verify({**program, 0: (foreign, *program[0])}, ownership)
    assert (violation.action, violation.rule) == ("1UNSHARD", "belongs to worker 1, the owner of its slot")


@looped(
    ("fields", "told"),
    [
        ({"pipelines": 2, "redundancy": "none", "stages_per_worker": 2, "schedule": "interleaved"}, []),
        ({"pipelines": 2, "redundancy": "none"}, ["fsdp: expected a whole number <= 1, found 2"]),
        ({"redundancy": "none"}, ["fsdp: expected 0 with one pipeline, found 2"]),
        ({"pipelines": 2, "redundancy": "eager"}, ["fsdp: expected 0 with redundancy eager, found 2"]),
        ({"pipelines": 2, "redundancy": "reroute"}, ["fsdp: expected 0 with redundancy reroute, found 2"]),
        ({"pipelines": 2, "redundancy": "lazy", "stages_per_worker": 2, "schedule": "interleaved"}, []),
    ],
)
def test_a_job_is_refused_where_shards_cannot_be(fields: dict[str, Any], told: list[str]) -> None:
    problems = check_job(Job(fsdp=2, stages=2, **fields))
    assert [str(each).split(" (")[0] for each in problems] == told
    assert all(each.hint for each in problems)


def test_the_refusal_suggests_a_combination_that_is_accepted() -> None:
    (problem,) = check_job(Job(fsdp=2, stages=4, pipelines=2))
    assert problem.hint == "a worker has 1 stage of each pipeline: give --stages-per-worker 2 --schedule looped-bfs"
    assert check_job(Job(fsdp=2, stages=4, pipelines=2, stages_per_worker=2, schedule="looped-bfs")) == []
    (problem,) = check_job(Job(fsdp=3, stages=4, pipelines=2, stages_per_worker=2, schedule="looped-bfs"))
    assert problem.hint == "a worker has 2 stages of each pipeline"
