"""Runs: the consecutive slots of a pipeline that one worker owns, and the time of a step that goes through them.

A worker has one run in each pipeline at most. The time is that of the list scheduler with runs in place of slots.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from engine.core.elastic.measured import MeasuredFacts
from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.list_scheduler import in_flight, starts

_STEADY = 16  # microbatches; any further one takes as long as the slowest worker


class SlotRun(NamedTuple):
    """The slots of stages `first` to ``end - 1`` of a pipeline, which `worker` owns."""

    pipeline: int
    first: int
    end: int
    worker: int


def runs_of(owners: Sequence[int], grid: Grid) -> tuple[tuple[SlotRun, ...], ...]:
    """Returns the runs of each pipeline, in the order of its stages."""
    return tuple(
        tuple(_runs(owners[pipeline * grid.stages : (pipeline + 1) * grid.stages], pipeline))
        for pipeline in range(grid.pipelines)
    )


def are_whole(runs: Sequence[Sequence[SlotRun]]) -> bool:
    """Returns whether no worker has two runs in a pipeline."""
    return all(len({each.worker for each in line}) == len(line) for line in runs)


def load_of(runs: Sequence[Sequence[SlotRun]], grid: Grid, measured: MeasuredFacts) -> dict[int, float]:
    """Returns the time that each owner computes for one microbatch of each of its pipelines, by worker."""
    forward, backward = measured.forwards(grid), measured.backwards(grid)
    loads: dict[int, float] = {}
    for _, first, end, worker in (each for line in runs for each in line):
        work = forward[end] - forward[first] + backward[end] - backward[first]
        loads[worker] = loads.get(worker, 0.0) + work / measured.speed_of(worker)
    return loads


def step_time(owners: Sequence[int], grid: Grid, measured: MeasuredFacts) -> float:
    """Returns the time of a step, in seconds or units, without transfers."""
    runs = runs_of(owners, grid)
    steady = max(_STEADY, 2 * max(map(len, runs)))
    further = max(0, grid.microbatches - steady)
    windows = in_flight(Ownership(grid, tuple(owners)))
    time = _dry(runs, windows, min(grid.microbatches, steady), grid, measured)
    return time + further * max(load_of(runs, grid, measured).values())


def _runs(owners: Sequence[int], pipeline: int) -> list[SlotRun]:
    found, first = [], 0
    for worker, group in groupby(owners):
        end = first + len(list(group))
        found.append(SlotRun(pipeline, first, end, worker))
        first = end
    return found


def _dry(
    runs: Sequence[Sequence[SlotRun]],
    windows: Mapping[Slot, int],
    microbatches: int,
    grid: Grid,
    measured: MeasuredFacts,
) -> float:
    """Returns the time of some microbatches. The number of a task is its priority."""
    order = sorted((each for line in runs for each in line), key=lambda run: (-run.first, run.pipeline))
    number = {run: each for each, run in enumerate(order)}
    width, forwards = len(order), len(order) * microbatches
    needs: list[list[int]] = [[] for _ in range(2 * forwards)]
    for line in runs:
        for at, run in enumerate(line):
            window = windows[run.pipeline, run.first]
            for microbatch in range(microbatches):
                forward = microbatch * width + number[run]
                backward = forwards + forward
                needs[backward].append(forward)
                if at > 0:
                    needs[forward].append(microbatch * width + number[line[at - 1]])
                if at + 1 < len(line):
                    needs[backward].append(forwards + microbatch * width + number[line[at + 1]])
                if microbatch > 0:
                    needs[forward].append(forward - width)
                    needs[backward].append(backward - width)
                if microbatch >= window:
                    needs[forward].append(backward - window * width)
    costs = [
        (sums[run.end] - sums[run.first]) / measured.speed_of(run.worker)
        for sums in (measured.forwards(grid), measured.backwards(grid))
        for _ in range(microbatches)
        for run in order
    ]
    return starts([run.worker for run in order] * (2 * microbatches), costs, needs)[1]
