"""Blocks of stages: their cut, their owners, their programs, the numbers in faults, and every refusal."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, Action
from engine.core.errors import UserError
from engine.core.faults.fault import At
from engine.core.faults.kill_text import kill_scenario
from engine.core.faults.matrix import proposals, slots_of_fields
from engine.core.faults.scenario import Scenario
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job
from engine.core.job.partition import cutting_problems, fresh_ownership, initial_program, partition
from engine.core.ownership import directions_of
from engine.core.program.build import pairs_in
from engine.core.program.dry_run import dry_run
from engine.core.program.schedule_csv import rows_to_csv
from engine.core.program.schedules import SCHEDULES
from engine.core.program.verify import verify
from tests.kills import parse_kills
from tests.looped import looped

KINDS = ["Embedding", *["Block"] * 10, "Head"]
WEIGHTS = [90, *[30] * 10, 60]


@looped("form", ["uniform", "parameters", "profile", "type:block", "4,8"])
@looped("blocks", [1, 2, 3])
def test_the_cut_into_stages_does_not_depend_on_blocks(form: str, blocks: int) -> None:
    stages = partition(form, 3, KINDS, WEIGHTS)
    starts = partition(form, 3, KINDS, WEIGHTS, blocks)
    assert starts[::blocks] == stages
    assert len(starts) == 3 * blocks
    assert all(first < after for first, after in pairwise(starts))


def test_a_stage_is_cut_by_the_rule_of_the_model() -> None:
    assert partition("uniform", 2, KINDS, (), 3) == (0, 2, 4, 6, 8, 10)
    assert partition("parameters", 2, KINDS, WEIGHTS, 2) == (0, 2, 6, 10)
    assert partition("type:block", 2, KINDS, (), 2) == (0, 4, 6, 9)
    assert partition("8", 2, KINDS, (), 4) == (0, 2, 4, 6, 8, 9, 10, 11)


def test_more_blocks_than_layers_are_refused_with_the_stages() -> None:
    two = "stage 1 has 1 layer, stage 2 has 2 layers"
    with pytest.raises(UserError) as refused:
        partition("9,10", 3, KINDS, (), 3)
    assert str(refused.value) == (f"blocks: expected 1, found 3 (a block has at least one layer, and {two})")
    assert [str(each) for each in cutting_problems("9,10", 3, 12, 3)] == [str(refused.value)]
    assert cutting_problems("uniform", 3, 12, 4) == []
    (found,) = cutting_problems("profile", 3, 12, 5)
    assert str(found).endswith("found 5 (a block has at least one layer, and the model has 12 layers for 3 stages)")
    with pytest.raises(UserError, match="stage 0 has 1 layer, stage 2 has 1 layer"):
        partition("parameters", 3, KINDS, [500, *WEIGHTS[1:]], 3)


def test_each_worker_owns_the_blocks_of_its_stages() -> None:
    assert fresh_ownership(Job(stages=3, blocks=2)).owners == (0, 0, 1, 1, 2, 2)
    assert fresh_ownership(Job(stages=2, blocks=2, pipelines=2)).owners == (0, 0, 1, 1, 2, 2, 3, 3)
    assert fresh_ownership(Job(stages=4, blocks=2, workers=3)).owners == (0, 0, 0, 0, 1, 1, 2, 2)
    assert fresh_ownership(Job(stages=2, blocks=3, pipelines=2, workers=1)).owners == (0,) * 12


@looped("schedule", SCHEDULES)
@looped(("workers", "blocks", "microbatches"), [(1, 4, 1), (2, 2, 3), (4, 2, 8), (4, 4, 3)])
def test_blocks_take_the_time_and_the_residuals_of_stages(
    schedule: str, workers: int, blocks: int, microbatches: int
) -> None:
    known, ways = SCHEDULES[schedule], directions_of(schedule)
    per_worker, workers = max(known.stages_per_worker[0], int(known.takes(2)) + 1), max(workers, ways)
    shape: dict[str, Any] = {"stages": workers * per_worker, "stages_per_worker": per_worker, "pipelines": ways}
    microbatches = max(microbatches, known.least_microbatches(workers))
    whole = Job(schedule=schedule, microbatches=microbatches, redundancy="none", **shape)
    job = replace(whole, blocks=blocks, elastic=True)
    assert check_job(job) == []
    usual = dry_run(*initial_program(whole))
    program, ownership = initial_program(job)
    run = dry_run(program, ownership)
    assert verify(program, ownership) == ()
    assert run.makespan <= usual.makespan * blocks
    assert run.makespan == usual.makespan * blocks or known.overlaps, "a pair is a forward and a backward of one block"
    assert run.peak_stash == {worker: peak * blocks for worker, peak in usual.peak_stash.items()}


def test_pairs_of_ones_own_schedule_stay_pairs() -> None:
    own = rows_to_csv(SCHEDULES["interleaved"](2, 4, 2), pairs_in("interleaved-paired"))
    job = Job(schedule=own, stages=4, stages_per_worker=2, microbatches=4, redundancy="none", blocks=2)
    assert check_job(job) == []
    program, ownership = initial_program(job)
    assert verify(program, ownership) == ()
    named = initial_program(replace(job, schedule="interleaved-paired"))[0]
    assert program == named


def test_gpipe_stays_gpipe() -> None:
    program, _ = initial_program(Job(schedule="gpipe", stages=2, blocks=2, microbatches=3, redundancy="none"))
    forwards = [each for each in program[1] if each.op in COMPUTE_OPS][:6]
    assert " ".join(map(str, forwards)) == "2F0 3F0 2F1 3F1 2F2 3F2"
    backwards = [each for each in program[1] if each.op in COMPUTE_OPS - FORWARD_OPS]
    assert " ".join(map(str, backwards)) == "3B0 2B0 3B1 2B1 3B2 2B2"


def test_every_refusal_comes_with_its_reason() -> None:
    assert [each.field for each in check_job(Job(blocks=2, schedule="1f1"))] == ["schedule"]
    assert [str(each) for each in check_job(Job(blocks=0))] == ["blocks: expected a whole number >= 1, found 0"]
    assert [each.field for each in check_job(Job(stages=128, blocks=64, microbatches=1))] == ["blocks"]


def moment(scenario: Scenario) -> Action:
    """Returns the action of a scenario's only fault."""
    (fault,) = scenario.faults
    assert isinstance(fault.trigger, At)
    return fault.trigger.action


def test_faults_name_blocks() -> None:
    assert moment(kill_scenario(["2:7"], Job(stages=2, blocks=4))).stage == 7
    with pytest.raises(UserError, match=r"a block from 0 to 7, found 8 \(the job has 2 stages of 4 blocks\)"):
        parse_kills(["2:8"], Job(stages=2, blocks=4))
    assert slots_of_fields({"stages": 3, "blocks": 4}) == 12
    assert slots_of_fields({"blocks": "many"}) is None


def test_a_fault_at_the_last_block_stays_there_with_fewer_blocks() -> None:
    scenario = kill_scenario(["2:7"], Job(stages=2, blocks=4))
    found = [
        (each.job.stages, each.job.blocks, moment(each).stage)
        for each in proposals(scenario)
        if each.job.slots < scenario.job.slots
    ]
    assert found == [(2, 1, 1), (2, 2, 3), (2, 3, 5), (1, 4, 3)]


def test_texts_that_number_a_slot_take_its_noun_from_the_job() -> None:
    """`Grid.noun` decides whether users read of stage 3 or of block 3."""
    rooms = ["bamboo_cli", *(f"engine/{each}" for each in ("report", "harness", "api", "runtime/agent"))]
    rooms += [f"engine/core/{each}" for each in ("faults", "checks", "protocol", "history")]
    root = Path(__file__).parents[2]
    wrong = [
        f"{path.relative_to(root)}: {line.strip()}"
        for room in rooms
        for path in sorted((root / room).rglob("*.py"))
        for line in path.read_text().splitlines()
        if re.search(r"f[\"'].*\bstages? \{", line)
    ]
    assert wrong == []
