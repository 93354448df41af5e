"""The step of the owners alone: compute actions and transfers, made for the workers that are asked for.

A worker of a thousand needs its own part of a step and those of its peers. Its list follows from the shape of the job,
and its transfers from the lists of the owners beside its slots. A walk through all parts, such as the dry run, gets
them from one pass over the whole step.

    asked for worker 5    the lists of workers 4, 5 and 6, and the transfers between them; of these the part of worker 5
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, Sequence, ValuesView
from dataclasses import dataclass
from functools import lru_cache

from engine.core.action import Program
from engine.core.errors import ensure
from engine.core.ownership import Grid, Ownership, directions_of, worker_of
from engine.core.program.dependencies import peers_of
from engine.core.program.passes import with_transfers
from engine.core.program.remaining_tasks import merged_compute
from engine.core.program.schedule_csv import is_text, lists_from_csv
from engine.core.program.schedules import SCHEDULES, ComputeList, ComputeLists, in_blocks, in_slices
from engine.core.program.teams import in_pipeline, is_in_list_order, teams_of


@dataclass(frozen=True, slots=True)
class OwnersCompute:
    """The compute actions of each owner, ordered by the schedule or (not `is_scheduled`) by the list scheduler."""

    workers: tuple[int, ...]
    line_of: Callable[[int], ComputeList]  # made anew each time
    is_scheduled: bool
    most_blocks: int = 1  # of the longest stage

    def program(self) -> Program:
        """Returns the lines of all owners."""
        return {worker: self.line_of(worker) for worker in self.workers}


@lru_cache(maxsize=4)
def owners_compute(schedule: str, grid: Grid, owners: tuple[int, ...]) -> OwnersCompute:
    """Returns the compute actions of the owners, in the order of the schedule while it has such owners."""
    ownership = Ownership(grid, owners)
    list_at = _lists(schedule, ownership)
    if list_at is None:
        if (in_teams := _in_teams(schedule, ownership)) is not None:
            return in_teams
        merged = merged_compute(ownership)
        return OwnersCompute(tuple(merged), merged.__getitem__, is_scheduled=False)
    places = {
        ownership.owner(pipeline, stage): (place, pipeline)
        for place, stage in enumerate(list_at.first_stages)
        for pipeline in range(0, grid.pipelines, directions_of(schedule))
    }

    def line(worker: int) -> ComputeList:
        place, pipeline = places[worker]
        return in_pipeline(list_at.make_list(place), pipeline)

    return OwnersCompute(tuple(sorted(places)), line, is_scheduled=True, most_blocks=grid.blocks)


def _in_teams(schedule: str, ownership: Ownership) -> OwnersCompute | None:
    teams = () if is_in_list_order(schedule, ownership.grid) else teams_of(schedule, ownership)
    team_of = {worker: team for team in teams for worker in team.workers}
    if not team_of:
        return None
    grid = ownership.grid

    def line(worker: int) -> ComputeList:
        return team_of[worker].line_of(schedule, worker, grid.microbatches, grid.slices)

    most_blocks = max(len(run) for team in teams for stages in team.stages for run in stages)
    return OwnersCompute(tuple(sorted(team_of)), line, is_scheduled=True, most_blocks=most_blocks)


class OwnersProgram(Mapping[int, ComputeList]):
    """The compute actions of all owners with their transfers; a part is made when it is first asked for."""

    def __init__(self, compute: OwnersCompute, ownership: Ownership):
        self._compute, self._ownership = compute, ownership
        self._known: dict[int, ComputeList] = {}
        self._whole: Program | None = None

    def __getitem__(self, worker: int) -> ComputeList:
        if self._whole is not None:
            return self._whole[worker]
        if worker not in self._known:
            if worker not in self._compute.workers:
                raise KeyError(worker)
            lines = {each: self._compute.line_of(each) for each in peers_of(worker, self._ownership)}
            self._known[worker] = with_transfers(lines, self._ownership)[worker]
        return self._known[worker]

    def __iter__(self) -> Iterator[int]:
        return iter(self._compute.workers)

    def __len__(self) -> int:
        return len(self._compute.workers)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mapping) and dict(self.items()) == dict(other.items())

    __hash__ = None  # type: ignore[assignment] # as of a dict

    def items(self) -> ItemsView[int, ComputeList]:
        """Returns all parts with their workers, which one pass makes."""
        return self.whole().items()

    def values(self) -> ValuesView[ComputeList]:
        """Returns all parts, which one pass makes."""
        return self.whole().values()

    def whole(self) -> Program:
        """Returns all parts, which one pass makes."""
        if self._whole is None:
            self._whole = with_transfers(self._compute.program(), self._ownership)
            self._known.clear()
        return self._whole


@lru_cache(maxsize=4)
def owners_program(schedule: str, grid: Grid, owners: tuple[int, ...]) -> OwnersProgram:
    """Returns the compute actions of a step by the owners alone, with their transfers; no stage is in shards."""
    return OwnersProgram(owners_compute(schedule, grid, owners), Ownership(grid, owners))


@dataclass(frozen=True, slots=True)
class _Lists:
    """The compute lists of a pipeline, by place: a stage of each, and the function that makes one."""

    first_stages: Sequence[int]
    make_list: Callable[[int], ComputeList]


def _lists(schedule: str, ownership: Ownership) -> _Lists | None:
    """Returns the compute lists of each pipeline; None if a stage is not on its worker of a fresh job."""
    grid, teams, directions = ownership.grid, [], directions_of(schedule)
    for pipeline in range(grid.pipelines):
        first = pipeline * grid.stages
        owners = ownership.owners[first : first + grid.stages]
        if not pipeline % directions:
            teams.append(tuple(dict.fromkeys(owners)))
        elif owners != teams[-1][::-1]:
            return None
    num_workers = len(teams[0])
    if len({worker for team in teams for worker in team}) * directions != grid.pipelines * num_workers:
        return None
    if is_text(schedule):
        lists = [in_blocks(line, grid.blocks) for line in lists_from_csv(schedule)]
        make: Callable[[int], ComputeList] = lists.__getitem__
        stages = [{action.stage for action in line} for line in lists]
    else:
        stages_per_worker, rest = divmod(grid.stages // grid.blocks, num_workers)
        known = SCHEDULES[schedule]
        rest = rest or num_workers % directions
        if rest or not known.takes(stages_per_worker) or grid.microbatches < known.least_microbatches(num_workers):
            return None
        stages = [set() for _ in range(num_workers)]
        for stage in range(grid.stages):
            stages[worker_of(stage // grid.blocks, num_workers, known.placement)].add(stage)

        def make(place: int) -> ComputeList:
            shape = num_workers, stages_per_worker, grid.microbatches + grid.slices - 1
            return in_blocks(in_slices(known.generate(place, *shape), grid.slices), grid.blocks)

    for of_line in stages:
        for pipeline in range(0, grid.pipelines, directions):
            if len({ownership.owner(pipeline, stage) for stage in of_line}) != 1:
                return None
    return _Lists(list(map(min, stages)), make) if len(stages) == num_workers else None


def on_owners(lists: ComputeLists, ownership: Ownership) -> Program:
    """Gives every pipeline the same compute lists, each to the owner of its stages; or every pair in two directions."""
    program: dict[int, ComputeList] = {}
    directions = 1 + max(action.pipeline for line in lists for action in line)
    for pipeline in range(0, ownership.grid.pipelines, directions):
        for line in lists:
            worker = ownership.owner(pipeline + line[0].pipeline, line[0].stage)
            ensure(worker not in program, f"worker {worker} owns the stages of two lists")
            program[worker] = in_pipeline(line, pipeline)
    return dict(sorted(program.items()))
