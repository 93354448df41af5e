"""The blocks that a job has by itself: the fewest whose step after a death is nearly the shortest that it can have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.job.job import Job
from engine.core.job.job_rules import BlockChoice, check_job
from engine.core.job.partition import known_ownership
from engine.core.ownership import Ownership
from engine.core.program.schedules import SCHEDULES
from engine.core.protocol import block_choice
from engine.core.protocol.block_choice import MOST_BLOCKS, NEAR, fewest_in_time, step_after_death, step_of

JOBS = (
    *(Job(stages=stages, microbatches=8) for stages in (2, 3, 4, 6)),
    Job(stages=4, pipelines=2, microbatches=4),
    Job(stages=4, pipelines=2, microbatches=4, redundancy="reroute"),
    Job(stages=4, pipelines=2, microbatches=4, redundancy="none"),
    Job(stages=2, pipelines=2, microbatches=4, fsdp=1),
    Job(stages=4, workers=2, microbatches=4),
    Job(stages=4, microbatches=8, redundancy="eager", redundancy_level=2),
    *(
        Job(stages=4 * each.stages_per_worker[0], stages_per_worker=each.stages_per_worker[0], schedule=name)
        for name, each in SCHEDULES.items()
        if name in ("zb1p", "zbv", "interleaved")
    ),
)


def offences(choose: Callable[[Job, int | None], BlockChoice], jobs: tuple[Job, ...]) -> Iterator[str]:
    """Yields each rule that a choice breaks; the step of each number of blocks is measured anew."""
    for job in jobs:
        times = {number: step_after_death(replace(job, blocks=number)) for number in range(1, MOST_BLOCKS + 1)}
        chosen = [choose(job, layers).blocks for layers in range(1, 8)]
        for layers, blocks in enumerate(chosen, 1):
            allowed = [number for number in times if number <= layers]
            if blocks not in allowed:
                yield f"{blocks} blocks for {layers} layers"
            elif times[blocks] > 1.05 * min(times[number] for number in allowed):
                yield f"{blocks} blocks are worse than the best by more than 5 %"
            elif any(times[less] <= 1.05 * min(times[number] for number in allowed) for less in range(1, blocks)):
                yield f"fewer than {blocks} blocks would do"
        if chosen != sorted(chosen):
            yield f"more layers give fewer blocks: {chosen}"


def test_no_choice_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    times: dict[str, float] = {}

    def measured(job: Job) -> float:
        if (text := repr(job)) not in times:
            times[text] = step_after_death(job)
        return times[text]

    monkeypatch.setattr(
        block_choice, "step_after_death", measured
    )  # one dry run of each job, for all numbers of layers
    assert list(offences(block_choice.block_choice, JOBS)) == []


def test_a_rule_that_always_chooses_one_is_found() -> None:
    def one(job: Job, layers: int | None) -> BlockChoice:
        return block_choice.block_choice(job, layers)._replace(blocks=1)

    assert any("worse than the best" in each for each in offences(one, JOBS))


def test_a_rule_that_always_chooses_the_most_is_found() -> None:
    def most(job: Job, layers: int | None) -> BlockChoice:
        return block_choice.block_choice(job, layers)._replace(blocks=min(layers or 1, MOST_BLOCKS))

    assert any("would do" in each for each in offences(most, JOBS))


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=MOST_BLOCKS))
def test_the_fewest_near_the_best_and_never_fewer_with_more_to_choose_from(steps: list[float]) -> None:
    chosen = 0
    for most in range(1, len(steps) + 1):
        times = dict(enumerate(steps[:most], 1))
        before, chosen = chosen, fewest_in_time(times)
        assert before <= chosen <= most
        assert times[chosen] <= NEAR * min(times.values())
        assert all(times[less] > NEAR * min(times.values()) for less in range(1, chosen))


def test_three_workers_share_the_halves_of_a_dead_one() -> None:
    """Two blocks are as good as four: the neighbours get one each, and a step takes 40.5 units instead of 51."""
    assert [step_after_death(Job(stages=3, blocks=number)) for number in (1, 2, 3, 4)] == [51, 40.5, 43, 40.5]
    assert block_choice.block_choice(Job(stages=3), 4) == (
        2,
        "a step after a death takes 51 forwards of a stage with 1 block per stage and 40.5 with 2",
    )
    assert block_choice.block_choice(Job(stages=2), 4) == (
        1,
        "a step after a death takes 48 forwards of a stage with 1 block per stage, and no more make it shorter",
    )


GROWING = (
    *(Job(stages=2, max_workers=most, elastic=True) for most in (3, 4, 5, 7, 8)),
    Job(stages=1, max_workers=4, elastic=True),
    Job(stages=2, pipelines=2, max_workers=8, elastic=True),
    Job(stages=1, pipelines=2, fsdp=1, max_workers=7, elastic=True),
    *(
        Job(stages=4, stages_per_worker=2, schedule=name, max_workers=8, elastic=True)
        for name in ("interleaved", "zbv")
    ),
)


@pytest.mark.parametrize("job", GROWING, ids=lambda job: f"{job.schedule} {job.pipelines} {job.max_workers}")
def test_a_job_that_may_grow_has_blocks_for_all_workers_and_no_more(job: Job) -> None:
    choice = block_choice.block_choice(job, 16)
    assert check_job(replace(job, blocks=choice.blocks)) == []
    steps = {number: step_of(replace(job, blocks=number), job.max_workers) for number in range(1, 17)}
    assert steps[choice.blocks].owners == job.max_workers
    wide = job.max_workers * job.stages_per_worker
    assert steps[choice.blocks].time <= 1.05 * min(
        step.time for number, step in steps.items() if wide <= number * job.stages * job.pipelines <= 2 * wide
    )
    assert all(
        step.owners < job.max_workers or step.time > 1.05 * steps[choice.blocks].time
        for number, step in steps.items()
        if number < choice.blocks
    )
    assert f"a step of {job.max_workers} workers takes" in choice.why


def test_few_layers_bound_the_workers_that_own() -> None:
    job = Job(stages=2, max_workers=3, elastic=True)
    choice = block_choice.block_choice(job, 2)
    assert (choice.blocks, choice.why.rpartition("; ")[2]) == (2, "2 of 3 workers own blocks then")
    assert block_choice.block_choice(job, None) == (2, "3 workers need 2")
    assert block_choice.block_choice(replace(job, max_workers=9), 3).blocks == 3, "which a rule of jobs refuses"


def test_a_large_job_that_may_grow_is_not_run_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_choice, "step_of", None)
    job = Job(stages=8, pipelines=4, microbatches=16, max_workers=100, elastic=True)
    choice = block_choice.block_choice(job, 32)
    assert choice.blocks == 6, "two blocks of 192 for each worker, and not one or two of 128"
    assert choice.why == ("the fullest of 100 workers has 0.5 of a stage with 4 blocks per stage and 0.3333 with 6")


def test_the_steps_of_a_run_do_not_depend_on_the_blocks_that_a_job_has_by_now() -> None:
    assert block_choice.block_choice(Job(stages=3, blocks=4), 4) == block_choice.block_choice(Job(stages=3), 4)


LARGE = Job(stages=2100, stages_per_worker=3, schedule="interleaved-flexible", microbatches=1)


@pytest.mark.parametrize(
    ("job", "layers", "words"),
    [
        (Job(stages=3), None, "only the workers know"),
        (Job(stages=3), 1, "the smallest stage has 1 layer"),
        (LARGE, 4, "the job takes no more"),
        (Job(stages=1), 4, "no other worker"),
        (Job(stages=3, redundancy="none"), 4, "no other worker"),
        (Job(stages=3, schedule="mine:order"), 4, "is not called"),
        (Job(stages=0), 4, "refused"),
        (Job(stages=3, schedule="1f2b"), 4, "refused"),
    ],
)
def test_one_block_where_no_dry_run_decides(job: Job, layers: int | None, words: str) -> None:
    choice = block_choice.block_choice(job, layers)
    assert (choice.blocks, words in choice.why) == (1, True), choice


def test_large_jobs_have_fewer_dry_runs_and_very_large_ones_none(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []
    without = block_choice._step_without

    def seen(job: Job, ownership: Ownership, victim: int, joiners: int) -> float:
        lost.append(victim)
        return without(job, ownership, victim, joiners)

    monkeypatch.setattr(block_choice, "_step_without", seen)
    step_after_death(Job(stages=8, microbatches=8))
    assert sorted(lost) == [0, 4, 7]
    lost.clear()
    step_after_death(Job(stages=8, microbatches=256))
    assert lost == [4]
    lost.clear()
    assert block_choice.block_choice(Job(stages=16, microbatches=256), 3).blocks == 3
    assert lost == []


def test_a_choice_breaks_no_rule_of_jobs() -> None:
    job = Job(stages=8, microbatches=400, adapt_schedule=4)
    choice = block_choice.block_choice(job, 4)
    assert check_job(replace(job, blocks=choice.blocks)) == []
    assert choice.blocks == 1
    assert known_ownership(replace(job, blocks=choice.blocks)) is not None
