"""The number of blocks of each stage that a job has by itself, by dry runs.

    owners before       0 0 0 0 | 1 1 1 1 | 2 2 2 2        three workers, four blocks per stage
    without worker 1    0 0 0 0   0 0 2 2   2 2 2 2        the owners that the policy wants

Rules: the fewest blocks whose step is within 5 % of the shortest win, because each block costs actions and records. No
stage has more blocks than the smallest one has layers. If more workers than those of the start may join, the step of
all of them counts: with fewer blocks some would own nothing. Else that after a death counts, with 1 to 4 blocks: of the
deaths of the first, a middle and the last worker of a pipeline the one that costs most; in a large job that of the
middle one. A very large job has the most blocks. If a large one grows, the blocks of its fullest worker count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from engine.core.errors import required
from engine.core.job.job import Job
from engine.core.job.job_rules import BlockChoice, check_job
from engine.core.job.partition import known_ownership
from engine.core.ownership import Ownership
from engine.core.protocol.assignment import ScheduleOrder, assign, step_time
from engine.core.protocol.measured_facts import MeasuredFacts
from engine.core.texts import counted

MOST_BLOCKS = 4
NEAR = 1.05  # of the shortest step
_TIME = "a step {} takes {{:.4g}} forwards of a stage"
_LARGE, _VERY_LARGE = 1024, 8192  # forwards of a step, in blocks


def block_choice(job: Job, layers: int | None) -> BlockChoice:
    """Returns the blocks of each stage of a job with so many layers in its smallest stage, None if nobody knows."""
    most, job = job.max_workers, replace(job, blocks=1, max_workers=0)
    if most > job.num_workers:
        return _for_workers(job, most, layers)
    nobody = "" if job.num_workers > 1 and job.retains else "no other worker can take over a block"
    if why := _why_no_dry_run(job, layers) or nobody:
        return BlockChoice(1, why)
    cuts = _cuts(job, 1, min(layers or 1, MOST_BLOCKS))
    if len(cuts) == 1:
        return BlockChoice(1, "the job takes no more")
    if _size(cuts[-1]) > _VERY_LARGE:
        return BlockChoice(cuts[-1].blocks, "the job is too large for dry runs of a step after a death")
    times = {cut.blocks: step_after_death(cut) for cut in cuts}
    blocks = fewest_in_time(times)
    return BlockChoice(blocks, _words(_TIME.format("after a death"), times, blocks))


def _for_workers(job: Job, most: int, layers: int | None) -> BlockChoice:
    """Returns the blocks for a step of `most` workers; if none is known, each worker has the runs of the start."""
    needed = -(-most // max(1, job.most_workers))
    least = min(needed, layers or needed)
    cuts = [] if _why_no_dry_run(job, layers) else _cuts(job, least, min(2 * needed, layers or 1))
    if not cuts:
        return BlockChoice(least, f"{most} workers need {needed}")
    if _size(cuts[-1]) > _LARGE:
        fullest = {cut.blocks: -(-cut.slots * cut.pipelines // most) / cut.blocks for cut in cuts}
        blocks = fewest_in_time(fullest)
        return BlockChoice(blocks, _words(f"the fullest of {most} workers has {{:.4g}} of a stage", fullest, blocks))
    steps = {cut.blocks: step_of(cut, most) for cut in cuts}
    times = {number: step.time for number, step in steps.items()}
    blocks = fewest_in_time(times)
    words, owners = _words(_TIME.format(f"of {most} workers"), times, blocks), steps[blocks].owners
    return BlockChoice(blocks, words if owners == most else f"{words}; {owners} of {most} workers own blocks then")


def _cuts(job: Job, least: int, most: int) -> list[Job]:
    """Returns the job with each number of blocks that its rules allow."""
    cuts = (replace(job, blocks=number) for number in range(least, most + 1))
    return [cut for cut in cuts if not check_job(cut, nccl_on_cpu=True)]


def _why_no_dry_run(job: Job, layers: int | None) -> str:
    """Returns why dry runs do not decide; empty if they do."""
    reasons = {
        "the generator of the schedule is not called in a dry run": not job.has_program,
        "the job is refused": bool(check_job(job, nccl_on_cpu=True)),
        "only the workers know the layers of the stages": layers is None,
        "the smallest stage has 1 layer": layers == 1,
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


def fewest_in_time(times: Mapping[int, float]) -> int:
    """Returns the least number of blocks whose time is within 5 % of the least time."""
    return min(number for number, time in times.items() if time <= NEAR * min(times.values()))


class StepForecast(NamedTuple):
    """The time of a step, in units of a stage's forward, and the number of workers that own blocks in it."""

    time: float
    owners: int


def step_of(job: Job, num_workers: int) -> StepForecast:
    """Returns the step of a job that so many workers have joined, with the owners that the policy wants."""
    ownership = required(known_ownership(job), "the schedule is known")
    workers, order = range(num_workers), ScheduleOrder(job.schedule, job.stages_per_worker)
    owners = assign(ownership, workers, MeasuredFacts(), order=order).owners
    return StepForecast(step_time(owners, ownership.grid, MeasuredFacts(), job.schedule) / job.blocks, len({*owners}))


def step_after_death(job: Job, joiners: int = 0) -> float:
    """Returns the time of a step after the death of one worker, in units of a stage's forward.

    The other workers, and joiners, own what the policy of an elastic job wants.
    """
    ownership = required(known_ownership(job), "the schedule is known")
    line = ownership.workers()[: max(2, job.num_workers // job.pipelines)]
    middle = line[len(line) // 2]
    victims = {middle} if _size(job) > _LARGE else {line[0], middle, line[-1]}
    return max(_step_without(job, ownership, worker, joiners) for worker in victims) / job.blocks


def _step_without(job: Job, ownership: Ownership, victim: int, joiners: int = 0) -> float:
    """Returns the time of a step without a worker, and with joiners, in units of a block's forward."""
    grid, order = ownership.grid, ScheduleOrder(job.schedule, job.stages_per_worker)
    live = [tuple(each for each in ownership.replicas(*slot) if each != victim) for slot in grid.slots()]
    others = [[line for line in live[place % grid.stages :: grid.stages] if line] for place in range(len(live))]
    heirs = Ownership(
        grid,
        tuple((line or beside[0])[0] for line, beside in zip(live, others, strict=True)),
        tuple(line[1:] for line in live),
    )
    survivors = [worker for worker in ownership.workers() if worker != victim]
    held = {worker: heirs.held_by(worker) for worker in survivors}
    newcomers = range(job.num_workers, job.num_workers + joiners)
    owners = assign(heirs, (*survivors, *newcomers), MeasuredFacts(), held, order).owners
    return step_time(owners, grid, MeasuredFacts(), job.schedule)


def is_run_dry(job: Job) -> bool:
    """Returns whether a step of the job with other workers can be run dry."""
    return job.has_program and _size(job) <= _VERY_LARGE


def _size(job: Job) -> int:
    return job.slots * job.pipelines * job.program_microbatches


def _words(form: str, times: Mapping[int, float], blocks: int) -> str:
    """Returns the choice in words: the `form` of a time with the fewest blocks, and the time with the chosen number."""
    least, shortest = min(times), min(times, key=times.__getitem__)
    words = f"{form.format(times[least])} with {counted(least, 'block')} per stage"
    told = {number: f"{times[number]:.4g} with {number}" for number in (blocks, shortest) if number != least}
    if len(times) == 1:
        return words
    if blocks == least:
        return f"{words}, and {f'at the best {told[shortest]}' if shortest != least else 'no more make it shorter'}"
    return f"{words} and {told[blocks]}{f', at the best {told[shortest]}' if shortest != blocks else ''}"
