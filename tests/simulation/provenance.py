"""Provenance instead of tensors: a value is the hash of the operation that made it and of its inputs in order.

Equal hashes mean the same operations on the same values in the same order, which is stronger than equal bits. Python's
hash of a tuple of numbers is the same in every process.

`fault_free` computes every state of a run without faults, with plain loops and without the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from engine.core.ownership import Grid

CLIP_NORM = 100.0
_WEIGHTS, _OPTIMIZER, _BUFFERS, _DATA, _ACTIVATION, _RESIDUAL, _GRADIENT = range(1, 8)
_ADDED, _COUNTED, _LOST, _SUMMED, _STEPPED, _MOVED, _CARRY = range(8, 15)


def first_weights(stage: int) -> int:
    return hash((_WEIGHTS, stage))


def first_optimizer(stage: int) -> int:
    return hash((_OPTIMIZER, stage))


def first_buffers(pipeline: int, stage: int) -> int:
    return hash((_BUFFERS, pipeline, stage))


def data(step: int, pipeline: int, microbatch: int) -> int:
    return hash((_DATA, step, pipeline, microbatch))


def activation(weights: int, buffers: int, *given: int) -> int:
    return hash((_ACTIVATION, weights, buffers, *given))


def residual(weights: int, buffers: int, *given: int) -> int:
    return hash((_RESIDUAL, weights, buffers, *given))


def counted(buffers: int, given: int) -> int:
    return hash((_COUNTED, buffers, given))


def lost(losses: int, made: int) -> int:
    return hash((_LOST, losses, made))


def gradient(kept: int, *given: int) -> int:
    return hash((_GRADIENT, kept, *given))


def carry(kept: int, *given: int) -> int:
    return hash((_CARRY, kept, *given))


def added(sums: int, kept: int, *given: int) -> int:
    return hash((_ADDED, sums, kept, *given))


def summed(parts: tuple[int, ...]) -> int:
    return hash((_SUMMED, *parts))


def norm(final: int) -> float:
    return float(final & 0xFFFF)


def loss(losses: int) -> float:
    return float(losses & 0xFFFF) / 16


def stepped(weights: int, optimizer: int, final: int, clip: float) -> tuple[int, int]:
    """Returns weights and optimizer state after the optimizer step."""
    optimizer = hash((_MOVED, optimizer, final))
    return hash((_STEPPED, weights, optimizer, clip)), optimizer


def clip_factor(squared_norms: list[float]) -> float:
    norm = math.sqrt(sum(squared_norms))
    return CLIP_NORM / norm if norm > CLIP_NORM else 1.0


State = tuple[int, int, tuple[int, ...]]  # weights, optimizer state, buffers of every pipeline


@dataclass(frozen=True)
class Reference:
    """A run without faults: the state of each stage at the beginning of each step, and the loss of each step."""

    states: tuple[tuple[State, ...], ...]
    losses: tuple[float, ...]
    clips: tuple[float, ...]


@cache
def fault_free(grid: Grid, steps: int) -> Reference:
    """Returns the reference of a job."""
    stages, pipelines = range(grid.stages), range(grid.pipelines)
    state = [
        (first_weights(stage), first_optimizer(stage), tuple(first_buffers(each, stage) for each in pipelines))
        for stage in stages
    ]
    states, losses, clips = [tuple(state)], [], []
    for step in range(steps):
        runs = [_pipeline(grid, state, step, each) for each in pipelines]
        reduced = [summed(tuple(run[0][stage] for run in runs)) for stage in stages]
        finals = [_final(grid, stage, reduced) for stage in stages]
        clip = clip_factor([norm(final) for final in finals])
        total = 0.0
        for run in runs:
            total += loss(run[2])
        losses.append(total / grid.pipelines)
        clips.append(clip)
        state = [
            (*stepped(state[stage][0], state[stage][1], finals[stage], clip), tuple(run[1][stage] for run in runs))
            for stage in stages
        ]
        states.append(tuple(state))
    return Reference(tuple(states), tuple(losses), tuple(clips))


def _final(grid: Grid, stage: int, reduced: list[int]) -> int:
    """Returns the gradient of a stage: the sum over all uses of its shared parameters, in the order of stages."""
    uses = sorted({stage, *(other for group in grid.ties if stage in group for other in group)})
    return reduced[stage] if uses == [stage] else summed(tuple(reduced[use] for use in uses))


def _pipeline(grid: Grid, state: list[State], step: int, pipeline: int) -> tuple[list[int], list[int], int]:
    """Returns the accumulators and buffers of each stage, and the losses, after one pipeline's share of a step."""
    sums = [0] * grid.stages
    buffers = [state[stage][2][pipeline] for stage in range(grid.stages)]
    losses = 0
    for first in range(0, grid.microbatches, grid.slices):
        kept: list[list[int]] = []  # by slice and stage
        for microbatch in range(first, first + grid.slices):
            states: list[tuple[int, ...]] = [(each,) for each in kept[-1]] if kept else [()] * grid.stages
            kept.append([])
            given = data(step, pipeline, microbatch)
            for stage in range(grid.stages):
                weights, before, inputs = state[stage][0], buffers[stage], (given, *states[stage])
                kept[-1].append(residual(weights, before, *inputs))
                buffers[stage] = counted(before, given)
                given = activation(weights, before, *inputs)
            losses = lost(losses, given)
        behind: list[tuple[int, ...]] = [()] * grid.stages
        for of_slice in reversed(kept):
            given = 0
            for stage in reversed(range(grid.stages)):
                inputs = given, *behind[stage]
                sums[stage] = added(sums[stage], of_slice[stage], *inputs)
                behind[stage] = (carry(of_slice[stage], *inputs),)
                given = gradient(of_slice[stage], *inputs)
    return sums, buffers, losses
