"""Matrices: axes and cases make cells; each cell is a whole scenario as plain values.

Rules: a case is a scenario with placeholders. ``$axis`` stands for the axis's value in the cell; ``with: $axis``
inserts all fields of that value. A case makes one cell per combination of the axes that it names. ``first``, ``middle``
and ``last`` are stages, or blocks, of the cell's own job. Cells and their order are a pure function of the matrix. Each
value of a cell keeps its place in the matrix file, so that an error can show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice, product
from math import prod
from typing import Any

from engine.core.config.job import Job
from engine.core.errors import MOST_PROBLEMS, Problem, UserError, nearest

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
    found: list[Cell] = []
    num_values = 0
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
            if num_cells + len(found) > MOST_CELLS or num_values > _MOST_VALUES:
                hint = "give fewer labels in `only`, or make two matrices"
                at_most = f"at most {MOST_CELLS} cells, with {_MOST_VALUES} values"
                raise UserError([Problem(_dotted(case.place), at_most, f"{num_cells + len(found)} cells", hint)])
            found += [_cell(case, list(zip(own, each, strict=True)), num_slots) for each in product(*labels)]
    unused = [axis.name for axis in axes if axis.name not in used]
    problems += [Problem(f"axes.{name}", "an axis that a case uses", repr(f"${name}")) for name in unused]
    if problems:
        raise UserError(problems)
    return found


def _size(value: Any) -> int:
    """Returns the number of values in a value."""
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return 1 + sum(map(_size, inner))


def _placeholders(value: Any, path: FieldPath, problems: list[Problem], axes: Mapping[str, Axis]) -> Iterator[str]:
    """Yields the axes that a value names; appends a problem for each unknown one."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield from _placeholders(each, (*path, key), problems, axes)
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


def _wrong_labels(case: MatrixCase, axes: Mapping[str, Axis], names: Mapping[str, None]) -> Iterator[Problem]:
    for name, labels in case.only.items():
        place = _dotted((*case.place, "only", name))
        if name not in names:
            yield Problem(place, "an axis that the case uses", repr(name), nearest(name, names))
            continue
        known = axes[name].values
        expected = f"one of {', '.join(known)}"
        for label in labels:
            if label not in known:
                yield Problem(place, expected, repr(label), nearest(label, known))


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
        for key, each in value.items():
            if key == SPREAD:
                for name in spread_axes(each):
                    filled |= _filled(axes[name], path, places[name], axes, places, origins)
                origins[path] = place
            else:
                filled[key] = _filled(each, (*path, key), (*place, key), axes, places, origins)
        return filled
    if isinstance(value, (list, tuple)):
        return [
            _filled(each, (*path, number), (*place, number), axes, places, origins) for number, each in enumerate(value)
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
        for each in value:
            _name_stages(each, num_slots)
    elif isinstance(value, dict):
        for key, each in value.items():
            if key == "stage" and each in _STAGES and num_slots is not None:
                value[key] = (0, num_slots // 2, num_slots - 1)[_STAGES.index(each)]
            else:
                _name_stages(each, num_slots)
