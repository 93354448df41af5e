"""Partitions: the index of the first layer of each stage or block, from the class names and weights of the layers.

Stages and blocks are never empty.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from engine.core.action import Program
from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.ownership import Ownership, Redundancy, directions_of, fresh, with_shadows
from engine.core.program.build import build_program
from engine.core.program.schedule_csv import placement_of
from engine.core.texts import counted
from engine.core.units import whole_number

MOST_LAYERS = 8192  # their names travel in one message


def partition(
    form: str, num_stages: int, kinds: Sequence[str], weights: Sequence[int], blocks: int = 1
) -> tuple[int, ...]:
    """Returns the first layer of each stage; with more than one of `blocks` in a stage, of each block.

    `kinds` are the class names of the layers. `weights` are the loads to balance: number of parameters for
    ``parameters``, measured nanoseconds for ``profile``, else unused. A stage is cut into blocks by the rule by which
    the model is cut into stages; where their first layers are given, uniformly. Raises UserError if `form` does
    not fit, or a stage has fewer layers than blocks.
    """
    num_layers = len(kinds)
    if problems := cutting_problems(form, num_stages, num_layers, blocks):
        raise UserError(problems)
    starts: tuple[int, ...] | None
    if form in ("parameters", "profile") or form.startswith("type:"):
        weights = _matches(form[len("type:") :], kinds) if form.startswith("type:") else weights
        starts = balanced(weights, num_stages)
    else:
        weights = ()
        starts = _uniform(num_layers, num_stages) if form == "uniform" else written(form, num_stages)
    if starts is None:
        raise UserError([_not_rising(form, num_stages, num_layers)])
    if problems := _small_stages(starts, num_layers, blocks):
        raise UserError(problems)
    return tuple(
        first + block
        for first, end in pairwise((*starts, num_layers))
        for block in (balanced(weights[first:end], blocks) if weights else _uniform(end - first, blocks))
    )


def cutting_problems(form: str, num_stages: int, num_layers: int, blocks: int = 1) -> list[Problem]:
    """Returns the problems of `form` that follow from the number of layers alone."""
    if num_layers > MOST_LAYERS:
        return [Problem("model", f"at most {MOST_LAYERS} layers", str(num_layers))]
    if num_stages > num_layers:
        return [Problem("stages", f"at most {num_layers}, the layers of the model", repr(num_stages))]
    starts = written(form, num_stages) if form[:1].isdigit() else None
    if starts and starts[-1] >= num_layers:
        return [_not_rising(form, num_stages, num_layers)]
    if form == "uniform":
        starts = _uniform(num_layers, num_stages)
    if starts:
        return _small_stages(starts, num_layers, blocks)
    if num_stages * blocks > num_layers:
        why = f"the model has {num_layers} layers for {num_stages} stages"
        return [_too_many(blocks, num_layers // num_stages, why)]
    return []


def smallest_stage(form: str, num_stages: int, num_layers: int) -> int | None:
    """Returns the layers of the smallest stage; None if the number of layers does not decide it, or `form` is wrong."""
    starts = written(form, num_stages) if form[:1].isdigit() else None
    if form == "uniform" and num_stages <= num_layers:
        starts = _uniform(num_layers, num_stages)
    if starts is None or starts[-1] >= num_layers:
        return None
    return min(end - first for first, end in pairwise((*starts, num_layers)))


def _small_stages(starts: Sequence[int], num_layers: int, blocks: int) -> list[Problem]:
    sizes = [end - first for first, end in pairwise((*starts, num_layers))]
    if blocks <= min(sizes):
        return []
    small = (f"stage {stage} has {counted(size, 'layer')}" for stage, size in enumerate(sizes) if size < blocks)
    return [_too_many(blocks, min(sizes), ", ".join(small))]


def _too_many(blocks: int, most: int, why: str) -> Problem:
    expected = f"a whole number from 1 to {most}" if most > 1 else "1"
    return Problem("blocks", expected, repr(blocks), f"a block has at least one layer, and {why}")


def _uniform(num_layers: int, num_parts: int) -> tuple[int, ...]:
    return tuple(part * num_layers // num_parts for part in range(num_parts))


def balanced(weights: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Returns the partition into contiguous stages that minimizes the heaviest weight, by bisection."""
    low, high = max(weights), sum(weights)
    while low < high:
        middle = (low + high) // 2
        if _num_filled(weights, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return _fill(weights, num_stages, low)


def _num_filled(weights: Sequence[int], bound: int) -> int:
    count, load = 1, 0
    for weight in weights:
        if load + weight > bound:
            count, load = count + 1, 0
        load += weight
    return count


def _fill(weights: Sequence[int], num_stages: int, bound: int) -> tuple[int, ...]:
    starts, load = [0], weights[0]
    for layer in range(1, len(weights)):
        stages_left = num_stages - len(starts)
        if stages_left and (load + weights[layer] > bound or len(weights) - layer == stages_left):
            starts.append(layer)
            load = 0
        load += weights[layer]
    return tuple(starts)


def _matches(pattern: str, kinds: Sequence[str]) -> list[int]:
    weights = [int(re.search(pattern, kind, re.IGNORECASE) is not None) for kind in kinds]
    if not any(weights):
        classes = ", ".join(sorted(set(kinds)))
        raise UserError([Problem("partition", f"a pattern that matches a layer's class ({classes})", repr(pattern))])
    return weights


def written(form: str, num_stages: int) -> tuple[int, ...] | None:
    """Returns the first layer of each stage for a `form` such as 2,4,6; None if it does not rise or fit."""
    starts = (0, *(whole_number(part) or 0 for part in form.split(",") if part))
    rising = all(before < after for before, after in pairwise(starts))
    return starts if rising and len(starts) == num_stages else None


def _not_rising(form: str, num_stages: int, num_layers: int) -> Problem:
    return Problem("partition", f"{num_stages - 1} rising layer numbers from 1 to {num_layers - 1}", repr(form))


# The ownership that a job asks for.
def fresh_ownership(job: Job) -> Ownership:
    """Returns the ownership of a job before any failure."""
    placement = placement_of(job.schedule, job.placement)
    ownership = fresh(job.grid, job.stages_per_worker, placement, directions_of(job.schedule))
    if job.workers:  # neighbours together: the fewest transfers
        owners = tuple(each * job.workers // job.most_workers for each in ownership.owners)
        ownership = replace(ownership, owners=owners)
    return shadowed(job, ownership, ownership.workers())


def known_ownership(job: Job) -> Ownership | None:
    """Returns the ownership of a job before any failure; None if the placement is that of a generator not called."""
    if job.has_program:
        return fresh_ownership(job)
    if job.stages_per_worker > 1 and job.placement == "auto":
        return None
    return fresh_ownership(replace(job, schedule=Job().schedule))  # any schedule has this placement


def shadowed(
    job: Job, ownership: Ownership, members: Collection[int], host_of: Mapping[int, str] | None = None
) -> Ownership:
    """Returns the ownership with the shadows that the job's policy wants; on several hosts all are placed anew."""
    if host_of and len(set(host_of.values())) > 1:
        bare = replace(ownership, shadows=())
        return with_shadows(bare, job.redundancy, job.redundancy_level, members, host_of=host_of)
    return with_shadows(ownership, job.redundancy, job.redundancy_level, members)


def holders(job: Job) -> list[frozenset[int]]:
    """Returns the workers that hold each slot's state at the start, in any pipeline, or with shards in its own."""
    ownership = fresh_ownership(job)
    if job.fsdp:
        return [frozenset(ownership.replicas(*slot)) for slot in job.grid.slots()]
    return [
        frozenset(worker for pipeline in range(job.pipelines) for worker in ownership.replicas(pipeline, stage))
        for stage in range(job.slots)
    ]


# The program of one step of a job before any failure.
def initial_program(job: Job) -> tuple[Program, Ownership]:
    """Returns the program of one step of a job, and its ownership."""
    ownership = fresh_ownership(job)
    return _program(job.schedule, ownership, job.redundancy, job.log_every, job.copy_time), ownership


@lru_cache(maxsize=8)  # the cells of a matrix that follow each other have few shapes
def _program(
    schedule: str, ownership: Ownership, redundancy: Redundancy, log_every: int, copy_time: float | None
) -> Program:
    return build_program(schedule, ownership, redundancy, log_every=log_every, copy_time=copy_time)
