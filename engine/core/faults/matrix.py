"""Matrices: axes and cases make cells; each cell is a whole scenario as plain values.

Rules: a case is a scenario with placeholders. ``$axis`` stands for the axis's value in the cell; ``with: $axis``
inserts all fields of that value. A case makes one cell per combination of the axes that it names. ``first``, ``middle``
and ``last`` are stages, or blocks, of the cell's own job. Cells and their order are a pure function of the matrix. Each
value of a cell keeps its place in the matrix file, so that an error can show it.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod
from statistics import median
from typing import Any

from engine.core.action import STAGE_OPS
from engine.core.errors import MOST_PROBLEMS, Problem, UserError, nearest
from engine.core.faults.fault import After, At, Kinds
from engine.core.faults.scenario import FaultSpec, Scenario
from engine.core.faults.scenario_rules import check_scenario
from engine.core.job.job import Job
from engine.core.job.job_rules import check_job

FieldPath = tuple[str | int, ...]
Fields = Mapping[str, Any]

SPREAD = "with"
MOST_CELLS = 2000  # a check of so many takes seconds
_MOST_VALUES = 100_000
_STAGES = ("first", "middle", "last")


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis: label -> value, a scalar or a mapping of fields; `places` are their places in the file."""

    name: str
    values: Mapping[str, Any]
    places: Mapping[str, FieldPath] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MatrixCase:
    """One case: a scenario with placeholders; `only` restricts it to some labels of an axis."""

    name: str
    values: Fields
    only: Mapping[str, tuple[str, ...]]
    place: FieldPath


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell: the labels of its axes, its scenario as plain values, and the place of each value in the file."""

    case: str
    labels: tuple[tuple[str, str], ...]
    values: dict[str, Any]
    origins: Mapping[FieldPath, FieldPath]

    @property
    def name(self) -> str:
        """The name of the cell, unique in its matrix."""
        return "/".join([self.case, *(label for _, label in self.labels)])


def slots_of_fields(job: Any) -> int | None:
    """Returns the slots of a pipeline that the fields of a job give, a job file has more; None if they are wrong."""
    own = job if isinstance(job, dict) else {}
    stages, blocks = own.get("stages", Job().stages), own.get("blocks", Job().blocks)
    return stages * blocks if type(stages) is int and type(blocks) is int else None


def cells(
    axes: tuple[Axis, ...], cases: tuple[MatrixCase, ...], num_slots: Callable[[Any], int | None] = slots_of_fields
) -> list[Cell]:
    """Returns the cells of a matrix, case by case, the last axis changing fastest.

    `num_slots` takes the job of a cell as written, and returns the number of slots of a pipeline.

    Raises:
        UserError: with every placeholder without an axis, every unknown label, every unused axis.
    """
    problems: list[Problem] = []
    used: set[str] = set()
    by_name = {axis.name: axis for axis in axes}
    all_cells: list[Cell] = []
    num_values = 0
    for axis in axes:
        problems += islice(_nested(axis, by_name), MOST_PROBLEMS + 1)
    for case in cases:
        names = dict.fromkeys(_placeholders(case.values, case.place, problems, by_name))
        used |= names.keys()
        own = [axis for axis in axes if axis.name in names]
        problems += islice(_wrong_labels(case, by_name, names), MOST_PROBLEMS + 1)
        if len(problems) > MOST_PROBLEMS:
            raise UserError(problems)
        if not problems:
            labels = [case.only.get(axis.name, tuple(axis.values)) for axis in own]
            num_cells = prod(map(len, labels))
            num_values += num_cells * _size(case.values)
            if num_cells + len(all_cells) > MOST_CELLS or num_values > _MOST_VALUES:
                hint = "give fewer labels in `only`, or make two matrices"
                at_most = f"at most {MOST_CELLS} cells, with {_MOST_VALUES} values"
                raise UserError([Problem(_dotted(case.place), at_most, f"{num_cells + len(all_cells)} cells", hint)])
            all_cells += [_cell(case, list(zip(own, each, strict=True)), num_slots) for each in product(*labels)]
    unused = [axis.name for axis in axes if axis.name not in used]
    problems += [Problem(f"axes.{name}", "an axis that a case uses", repr(f"${name}")) for name in unused]
    if problems:
        raise UserError(problems)
    return all_cells


def _size(value: Any) -> int:
    """Returns the number of values in a value."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return 1 + sum(map(_size, inner))


def _placeholders(value: Any, path: FieldPath, problems: list[Problem], axes: Mapping[str, Axis]) -> Iterator[str]:
    """Yields the axes that a value names; appends a problem for each unknown one."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            named = part
            if key == SPREAD:
                names = [f"${name}" for name in spread_axes(part)]
                named = names if isinstance(part, (list, tuple)) else names[0]
            yield from _placeholders(named, (*path, key), problems, axes)
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _placeholders(each, (*path, number), problems, axes)
    elif isinstance(value, str) and value.startswith("$"):
        if value[1:] in axes:
            yield value[1:]
        else:
            if len(problems) > MOST_PROBLEMS:
                raise UserError(problems)
            hint = nearest(value[1:], axes) or f"there is {', '.join(axes) or 'none'}"
            problems.append(Problem(_dotted(path), "the name of an axis after $", repr(value), hint))


def _nested(axis: Axis, axes: Mapping[str, Axis]) -> Iterator[Problem]:
    for label, value in axis.values.items():
        unknown: list[Problem] = []
        if [*_placeholders(value, (), unknown, axes)] or unknown:
            place = _dotted(axis.places.get(label, ("axes", axis.name)))
            yield Problem(place, "a value that names no other axis", repr(value))


def _wrong_labels(case: MatrixCase, axes: Mapping[str, Axis], names: Mapping[str, None]) -> Iterator[Problem]:
    for name, labels in case.only.items():
        place = _dotted((*case.place, "only", name))
        if name not in names:
            yield Problem(place, "an axis that the case uses", repr(name), nearest(name, names))
            continue
        values = axes[name].values
        expected = f"one of {', '.join(values)}"
        for label in labels:
            if label not in values:
                yield Problem(place, expected, repr(label), nearest(label, values))


def _dotted(path: FieldPath) -> str:
    return ".".join(str(part) for part in path)


def _cell(case: MatrixCase, chosen: list[tuple[Axis, str]], num_slots: Callable[[Any], int | None]) -> Cell:
    labels = tuple((axis.name, label) for axis, label in chosen)
    values = {axis.name: axis.values[label] for axis, label in chosen}
    places = {axis.name: axis.places.get(label, ("axes", axis.name)) for axis, label in chosen}
    origins: dict[FieldPath, FieldPath] = {}
    filled = _filled(case.values, (), case.place, values, places, origins)
    _name_stages(filled.get("faults"), num_slots(filled.get("job")))
    return Cell(case.name, labels, filled, origins)


def _filled(
    value: Any,
    path: FieldPath,
    place: FieldPath,
    axes: Fields,
    places: Mapping[str, FieldPath],
    origins: dict[FieldPath, FieldPath],
) -> Any:
    """Returns a value with its placeholders filled in; stores the place of each part in `origins`."""
    origins[path] = place
    if isinstance(value, Mapping):
        filled: dict[str, Any] = {}
        for key, part in value.items():
            if key == SPREAD:
                for name in spread_axes(part):
                    filled |= _filled(axes[name], path, places[name], axes, places, origins)
                origins[path] = place
            else:
                filled[key] = _filled(part, (*path, key), (*place, key), axes, places, origins)
        return filled
    if isinstance(value, (list, tuple)):
        return [
            _filled(part, (*path, number), (*place, number), axes, places, origins) for number, part in enumerate(value)
        ]
    if isinstance(value, str) and value.startswith("$"):
        return _filled(axes[value[1:]], path, places[value[1:]], axes, places, origins)
    return value


def spread_axes(value: Any) -> list[str]:
    """Returns the axes that a value of ``with`` names: one, or a list."""
    return [str(each).removeprefix("$") for each in (value if isinstance(value, (list, tuple)) else [value])]


def _name_stages(value: Any, num_slots: int | None) -> None:
    """Replaces first, middle and last by numbers in each field `stage` below `value`, in place."""
    if isinstance(value, list):
        for part in value:
            _name_stages(part, num_slots)
    elif isinstance(value, dict):
        for key, part in value.items():
            if key == "stage" and part in _STAGES and num_slots is not None:
                value[key] = (0, num_slots // 2, num_slots - 1)[_STAGES.index(part)]
            else:
                _name_stages(part, num_slots)


# CI shards: a matrix cut into parts of about equal time, one per CI job.
#
# Rules: the cut is a pure function of cells and times, so that jobs that compute it separately agree and every cell is
# in exactly one shard. A cell without a known time counts with the median of the others. Cells keep their order in a
# shard.

MAX_JOBS = 256  # GitHub's limit for one workflow matrix


@dataclass(frozen=True, slots=True)
class CiShard:
    """Part `index`, from 1, of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_part(text: str) -> CiShard:
    """Returns the part that a text such as ``3/8`` names.

    Raises:
        UserError: the text has another form, or the part is not in 1 to count.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
    part = CiShard(int(match[1]), int(match[2])) if match else CiShard(0, 0)
    if not 1 <= part.index <= part.count:
        raise UserError([Problem("--shard", "a part such as 3/8, from 1/8 to 8/8", repr(text))])
    return part


def estimated(names: Sequence[str], seconds: Mapping[str, float], usual_s: float = 1.0) -> dict[str, float]:
    """Returns the expected seconds of each cell: its last time, or else the median of the others."""
    times = [seconds[name] for name in names if name in seconds]
    usual_s = median(times) if times else usual_s
    return {name: seconds.get(name, usual_s) for name in names}


def shards(names: Sequence[str], count: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """Returns the names in `count` parts: assigns the longest first, each to the part with the least total time."""
    times = estimated(names, seconds)
    place = {name: number for number, name in enumerate(names)}
    parts: list[list[str]] = [[] for _ in range(count)]
    heap = [(0.0, index) for index in range(count)]
    for name in sorted(names, key=lambda name: (-times[name], place[name])):
        total, index = heapq.heappop(heap)
        parts[index].append(name)
        heapq.heappush(heap, (total + times[name], index))
    return [sorted(part, key=place.__getitem__) for part in parts]


def workflow_matrix(
    matrix: str, names: Sequence[str], count: int, seconds: Mapping[str, float]
) -> dict[str, list[dict[str, str | int]]]:
    """Returns the matrix of a GitHub workflow: one job per shard, at most `MAX_JOBS`, none of them empty."""
    count = max(1, min(count, len(names), MAX_JOBS))
    return {
        "include": [
            {"matrix": matrix, "shard": str(CiShard(index, count)), "cells": len(part)}
            for index, part in enumerate(shards(names, count, seconds), start=1)
        ]
    }


# Shrinking: reduces a failing scenario to the smallest one that still fails.
#
# Rules: it is pure; the caller decides whether a scenario fails. Each proposal is smaller and breaks no rule: fewer
# faults first, then fewer pipelines, blocks, stages, steps and microbatches, down to one, to a half, and by one. Faults
# move with the reduction: a fault at the first or last stage stays there, and faults keep their distance from the first
# fault. The result is a scenario of which no proposal fails, or the smallest one found within `budget` tries.


@dataclass(frozen=True, slots=True)
class SmallestScenario:
    """The smallest scenario found, the number of tries, and whether no proposal was left untried."""

    scenario: Scenario
    num_tries: int
    is_minimal: bool


def shrink(scenario: Scenario, fails: Callable[[Scenario], bool], kinds: Kinds, budget: int = 40) -> SmallestScenario:
    """Returns the smallest scenario found for which `fails` is true, as for the given one; `kinds` are by name."""
    num_tries = 0
    tried: list[Scenario] = []
    while True:
        for proposal in proposals(scenario):
            if proposal in tried or not is_possible(proposal, kinds):
                continue
            if num_tries == budget:
                return SmallestScenario(scenario, num_tries, is_minimal=False)
            num_tries += 1
            tried.append(proposal)
            if fails(proposal):
                scenario = proposal
                break
        else:
            return SmallestScenario(scenario, num_tries, is_minimal=True)


def is_possible(scenario: Scenario, kinds: Kinds) -> bool:
    """Returns whether a scenario breaks no rule."""
    return not check_job(scenario.job) and not check_scenario(scenario, kinds)


def proposals(scenario: Scenario) -> Iterator[Scenario]:
    """Yields smaller scenarios, the greatest reductions first; some may break a rule."""
    for number in range(len(scenario.faults)):
        if len(scenario.faults) > 1:
            yield _without_fault(scenario, number)
    job = scenario.job
    for count in _fewer(job.pipelines):
        yield _mapped(scenario, replace(job, pipelines=count), pipelines=count)
    for count in _fewer(job.blocks):
        yield _mapped(scenario, replace(job, blocks=count))
    for count in _fewer(job.stages):
        yield _mapped(scenario, replace(job, stages=count))
    first = min((each.trigger.step for each in scenario.faults if isinstance(each.trigger, At)), default=0)
    for earlier in dict.fromkeys((first, first // 2, 1)):
        if 0 < earlier <= first:
            yield _mapped(scenario, replace(job, steps=job.steps - earlier), earlier=earlier)
    for count in _fewer(job.steps):
        yield replace(scenario, job=replace(job, steps=count))
    for count in _fewer(job.microbatches):
        yield _mapped(scenario, replace(job, microbatches=count), microbatches=count)


def _fewer(count: int) -> list[int]:
    """Returns the smaller counts to try: one, a half, one less."""
    return [each for each in dict.fromkeys((1, count // 2, count - 1)) if 0 < each < count]


def _without_fault(scenario: Scenario, number: int) -> Scenario:
    """Returns the scenario without a fault and the faults that wait for it."""
    gone = {scenario.faults[number].id}
    left = list(scenario.faults)
    while True:
        staying = [
            fault
            for fault in left
            if fault.id not in gone and not (isinstance(fault.trigger, After) and fault.trigger.fault in gone)
        ]
        gone |= {each.id for each in left} - {each.id for each in staying}
        if len(staying) == len(left):
            return replace(scenario, faults=tuple(staying))
        left = staying


def _mapped(scenario: Scenario, job: Job, **smaller: int) -> Scenario:
    """Returns the scenario with a smaller job; moves each fault to a place that this job has."""
    slots, old = job.slots, scenario.job.slots
    pipelines = smaller.get("pipelines", scenario.job.pipelines)
    microbatches = smaller.get("microbatches", scenario.job.microbatches)

    def stage_of(stage: int) -> int:
        if slots == old:
            return stage
        return slots - 1 if stage == old - 1 else min(stage, max(0, slots - 2))

    def moved(spec: FaultSpec) -> FaultSpec:
        trigger, target = spec.trigger, spec.target
        if isinstance(trigger, At):
            action = trigger.action._replace(
                stage=stage_of(trigger.action.stage), pipeline=min(trigger.action.pipeline, pipelines - 1)
            )
            if action.op not in STAGE_OPS:
                action = action._replace(microbatch=min(action.microbatch, microbatches - 1))
            trigger = replace(trigger, action=action, step=trigger.step - smaller.get("earlier", 0))
        if target.stage is not None and target.pipeline is not None:
            target = replace(target, stage=stage_of(target.stage), pipeline=min(target.pipeline, pipelines - 1))
        return replace(spec, trigger=trigger, target=target)

    return replace(scenario, job=job, faults=tuple(moved(each) for each in scenario.faults))
