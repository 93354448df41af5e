"""The number of blocks of each stage that a job has by itself: dry runs of a step after a death, with 1 to 4 blocks.

    owners before       0 0 0 0 | 1 1 1 1 | 2 2 2 2        three workers, four blocks per stage
    without worker 1    0 0 0 0   0 0 2 2   2 2 2 2        the owners that the policy wants

Rules: the fewest blocks whose step is within 5 % of the shortest win, because each block costs actions and records. No
stage has more blocks than the smallest one has layers. Of the deaths of the first, a middle and the last worker of a
pipeline the one counts that costs most; in a large job that of the middle one. A very large job has the most blocks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.core.errors import required
from engine.core.job.job import Job
from engine.core.job.job_rules import BlockChoice, check_job
from engine.core.job.partition import known_ownership
from engine.core.ownership import Ownership
from engine.core.protocol.assignment import ScheduleOrder, assign, step_time
from engine.core.protocol.measured_facts import MeasuredFacts

MOST_BLOCKS = 4
NEAR = 1.05  # of the shortest step
_LARGE, _VERY_LARGE = 1024, 8192  # forwards of a step, in blocks


def block_choice(job: Job, layers: int | None) -> BlockChoice:
    """Returns the blocks of each stage of a job with so many layers in its smallest stage, None if nobody knows."""
    job = replace(job, blocks=1)
    if why := _why_one(job, layers):
        return BlockChoice(1, why)
    more = (replace(job, blocks=number) for number in range(2, min(layers or 1, MOST_BLOCKS) + 1))
    cuts = [job, *(cut for cut in more if not check_job(cut, nccl_on_cpu=True))]
    if len(cuts) == 1:
        return BlockChoice(1, "the job takes no more")
    if _size(cuts[-1]) > _VERY_LARGE:
        return BlockChoice(cuts[-1].blocks, "the job is too large for dry runs of a step after a death")
    times = {cut.blocks: step_after_death(cut) for cut in cuts}
    blocks = fewest_in_time(times)
    return BlockChoice(blocks, _words(times, blocks))


def _why_one(job: Job, layers: int | None) -> str:
    """Returns why a job has one block without a dry run; empty if dry runs decide."""
    reasons = {
        "the generator of the schedule is not called in a dry run": not job.has_program,
        "the job is refused": bool(check_job(job, nccl_on_cpu=True)),
        "only the workers know the layers of the stages": layers is None,
        "the smallest stage has 1 layer": layers == 1,
        "no other worker can take over a block": job.num_workers == 1 or not job.retains,
    }
    return next((why for why, is_so in reasons.items() if is_so), "")


def fewest_in_time(times: Mapping[int, float]) -> int:
    """Returns the least number of blocks whose time is within 5 % of the least time."""
    return min(number for number, time in times.items() if time <= NEAR * min(times.values()))


def step_after_death(job: Job) -> float:
    """Returns the time of a step after the death of one worker, in units of a stage's forward.

    The other workers own what the policy of an elastic job wants.
    """
    ownership = required(known_ownership(job), "the schedule is known")
    line = ownership.workers()[: max(2, job.num_workers // job.pipelines)]
    middle = line[len(line) // 2]
    victims = {middle} if _size(job) > _LARGE else {line[0], middle, line[-1]}
    return max(_step_without(job, ownership, worker) for worker in victims) / job.blocks


def _step_without(job: Job, ownership: Ownership, victim: int) -> float:
    """Returns the time of a step without a worker, in units of a block's forward."""
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
    owners = assign(heirs, survivors, MeasuredFacts(), held, order).owners
    return step_time(owners, grid, MeasuredFacts(), job.schedule)


def _size(job: Job) -> int:
    return job.slots * job.pipelines * job.program_microbatches


def _words(times: Mapping[int, float], blocks: int) -> str:
    """Returns the choice in words: a step after a death with one block, and with the chosen number."""
    shortest = min(times, key=times.__getitem__)
    words = f"a step after a death takes {times[1]:.4g} units with 1 block per stage"
    told = {number: f"{times[number]:.4g} with {number}" for number in (blocks, shortest) if number != 1}
    if blocks == 1:
        return f"{words}{f', and at the best {told[shortest]}' if shortest != 1 else ', and no more make it shorter'}"
    return f"{words} and {told[blocks]}{f', at the best {told[shortest]}' if shortest != blocks else ''}"
