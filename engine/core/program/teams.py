"""Teams: the workers of a pipeline in the order of a schedule, and the runs of blocks that are its stages by now."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from engine.core.action import make_action
from engine.core.ownership import Grid, Ownership, directions_of, worker_of
from engine.core.program.schedules import SCHEDULES, ComputeList, Schedule, in_runs, in_slices


def is_in_list_order(schedule: str, grid: Grid) -> bool:
    """Returns whether the list scheduler orders unequal stages: those of 1F1B and its kin, and of CSV; not shards."""
    return schedule not in SCHEDULES or (SCHEDULES[schedule].in_list_order and not grid.fsdp)


class Team(NamedTuple):
    """The workers of a pipeline in the order of the schedule, and the blocks of each of its stages.

    With two directions it has a pair of pipelines, which begins with `pipeline`, and the stages of both.
    """

    pipeline: int
    workers: tuple[int, ...]
    stages: tuple[tuple[range, ...], ...]

    @property
    def stages_per_worker(self) -> int:
        """The number of stages of a pipeline on each worker."""
        return len(self.stages[0]) // len(self.workers)

    def list_of(self, schedule: str, worker: int, microbatches: int) -> ComputeList:
        """Returns the compute list of a worker by a schedule, in stages."""
        shape = len(self.workers), self.stages_per_worker, microbatches
        return SCHEDULES[schedule].generate(self.workers.index(worker), *shape)

    def line_of(self, schedule: str, worker: int, microbatches: int, slices: int) -> ComputeList:
        """Returns the compute list of a worker by a schedule, in blocks; `microbatches` counts slices."""
        line = in_slices(self.list_of(schedule, worker, microbatches + slices - 1), slices)
        return in_pipeline(in_runs(line, lambda action: self.stages[action.pipeline][action.stage]), self.pipeline)


def teams_of(schedule: str, ownership: Ownership) -> tuple[Team, ...]:
    """Returns the teams of a job if the runs of blocks stand as the stages of a named schedule; else none.

    So the number of stages follows the workers. Where a V turns, one run has two stages.

        zbv, 8 blocks    owners  0 0 1 1 1 1 0 0    stages  0 0 1 1 2 2 3 3
                                 0 1 2 3 3 2 1 0            0 1 2 3 4 5 6 7
    """
    grid, directions, known = ownership.grid, directions_of(schedule), SCHEDULES.get(schedule)
    if known is None:
        return ()
    teams: list[Team] = []
    for pipeline in range(0, grid.pipelines, directions):
        lines = [ownership.owners[(pipeline + way) * grid.stages :][: grid.stages] for way in range(directions)]
        workers = tuple(dict.fromkeys(lines[0]))
        if directions == 2 and lines[1] != lines[0][::-1]:
            return ()
        stages = [_stages_in(line, known.placement == "v") for line in lines]
        team = Team(pipeline, workers, tuple(stages))
        if not _is_shaped(team, lines[0], known, grid.microbatches):
            return ()
        if grid.fsdp and teams and teams[0].stages != team.stages:
            return ()  # the owners of a stage in all pipelines put it together at the same places
        teams.append(team)
    distinct = {worker for team in teams for worker in team.workers}
    return tuple(teams) if len(distinct) == sum(len(team.workers) for team in teams) else ()


def _stages_in(line: Sequence[int], turns: bool) -> tuple[range, ...]:
    """Returns the runs of equal owners; if the line `turns`, that in its middle is cut into two."""
    ends = [0, *(end for end in range(1, len(line)) if line[end] != line[end - 1]), len(line)]
    runs = [range(first, end) for first, end in pairwise(ends)]
    if turns:
        middle = runs[len(runs) // 2]
        half = middle.start + (len(middle) + 1) // 2
        runs[len(runs) // 2 : len(runs) // 2 + 1] = [range(middle.start, half), range(half, middle.stop)]
    return tuple(run for run in runs if run)


def _is_shaped(team: Team, line: Sequence[int], known: Schedule, microbatches: int) -> bool:
    num_workers, stages = len(team.workers), team.stages[0]
    return (
        known.takes(team.stages_per_worker)
        and len(stages) == num_workers * team.stages_per_worker
        and num_workers % len(team.stages) == 0
        and microbatches >= known.least_microbatches(num_workers)
        and all(
            line[run.start] == team.workers[worker_of(stage, num_workers, known.placement)]
            for stage, run in enumerate(stages)
        )
    )


def in_pipeline(line: ComputeList, pipeline: int) -> ComputeList:
    """Returns the compute list of a worker of the first pipeline as that of another one."""
    if pipeline == 0:
        return line
    return tuple(make_action(stage, op, microbatch, pipeline + way) for stage, op, microbatch, way in line)
