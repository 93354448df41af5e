"""Reads matrix files and expands them to cells; every mistake is reported at its line and column.

Rules: the job and the expectations of a matrix hold for every case; a field of the case overrides them. A combination
of axes that names an action which its stage does not have, such as a receive of the first stage, makes no cell. An
axis value without any cell is a mistake. A scenario file is a matrix of one cell.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from engine.core.errors import Problem, UserError
from engine.core.faults.fault import FaultKind
from engine.core.faults.matrix import SPREAD, Axis, Cell, MatrixCase, cells, spread_axes
from engine.core.faults.scenario import scenario_plain
from engine.core.job.job_rules import ANYTHING, JobParts
from engine.files.jobs.forms import CASE, MATRIX, VERSION, Reading, in_order
from engine.files.jobs.job_layers import PROJECT_FILE, kind_of, other_kind
from engine.files.jobs.job_value import shown
from engine.files.jobs.library import find_file, library_names
from engine.files.jobs.scenario_file import FROM, LoadedScenario, ScenarioJobs, load_document, with_changes
from engine.files.strict_yaml import Document, KeyPath, read_yaml

_ABSENT = re.compile(r"faults\.\d+\.at\.action")


@dataclass(frozen=True, slots=True)
class PlannedCell:
    """One cell that can run: its scenario, the faults drawn by its seed, and the line of its case."""

    cell: Cell
    loaded: LoadedScenario
    line: int


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix: its cells, and in `absent` the combinations of axes that make no cell."""

    path: Path
    name: str
    about: str
    axes: tuple[Axis, ...]
    cells: tuple[PlannedCell, ...]
    absent: tuple[Cell, ...]

    @property
    def foreign(self) -> tuple[Problem, ...]:
        """The values of all cells that a run takes with ``--trust-code`` only."""
        return tuple(dict.fromkeys(value for each in self.cells for value in each.loaded.foreign))

    @property
    def job_from(self) -> str:
        """The sources of the jobs of the cells, in words, each with the fields that its cells change."""
        changed: dict[str, dict[str, None]] = {}
        for cell in self.cells:
            source = cell.loaded.source
            fields = changed.setdefault(source.base(cell.loaded.scenario.job, "the matrix"), {})
            fields.update(dict.fromkeys(source.changed))
        return "; ".join(with_changes(base, fields) for base, fields in changed.items())


def read_matrix(
    name_or_path: str, kinds: Mapping[str, FaultKind], settings: Iterable[str] = (), offered: JobParts = ANYTHING
) -> Matrix:
    """Returns the matrix of a file, or of a name in the library.

    Each of `settings` is a ``FIELD=VALUE`` that overrides a field of every cell's job; `offered` checks the models,
    data and arguments that a job names.

    Raises:
        UserError: with every problem found.
        NothingMatchedError: the library has no such matrix.
    """
    path = find_file(name_or_path, "scenario or matrix", library_names())
    document = read_yaml(path)
    reading = Reading(document, list(document.problems))
    settings = tuple(settings)
    jobs = ScenarioJobs(path, settings)

    def load(scenario: Document) -> LoadedScenario:
        return load_document(path, scenario, kinds, None, settings, offered, jobs)

    if (problem := other_kind(document, "scenario", "matrix")) is not None:
        raise UserError([problem])
    if kind_of(document) == "scenario" and {("faults",), ("host_faults",)} & document.key_places.keys():
        return _of_one_scenario(path, load(document))
    unread = document.value is None and document.problems
    values = None if unread else reading.check(MATRIX, (), document.value)
    if values is None:
        raise in_order(reading.problems)
    checked = [reading.check(CASE, ("cases", number), each) for number, each in enumerate(values.get("cases", ()))]
    values["cases"] = checked
    axes = tuple(_axis(reading, name, each) for name, each in values.get("axes", {}).items())
    by_name = {axis.name: axis for axis in axes}
    cases = tuple(_case(reading, number, values, by_name) for number in _whole_cases(values))
    if reading.problems:
        raise in_order(reading.problems)
    try:
        expanded = cells(axes, cases, jobs.num_slots)
    except UserError as error:
        raise in_order(reading.located(each) for each in error.problems) from None
    planned, absent = _checked(reading, path, expanded, load)
    return Matrix(path, values["name"], values["about"].strip(), axes, planned, absent)


def _of_one_scenario(path: Path, loaded: LoadedScenario) -> Matrix:
    scenario = loaded.scenario
    cell = Cell(scenario.name, (), scenario_plain(scenario), {})
    return Matrix(path, scenario.name, scenario.about, (), (PlannedCell(cell, loaded, 1),), ())


def _whole_cases(values: Mapping[str, Any]) -> list[int]:
    """Returns the numbers of the cases that have the required fields."""
    return [number for number, each in enumerate(values["cases"]) if each and {"name", "faults"} <= each.keys()]


def _axis(reading: Reading, name: str, value: Any) -> Axis:
    path: KeyPath = ("axes", name)
    if isinstance(value, dict) and value:
        for label, fields in value.items():
            if not isinstance(fields, dict) or not fields:
                reading.refuse((*path, label), "a mapping of fields", shown(fields))
        return Axis(name, value, {label: (*path, label) for label in value})
    if not isinstance(value, list) or not value or any(isinstance(each, (dict, list)) for each in value):
        reading.refuse(path, "a list of values, or a mapping of label: fields", shown(value))
        return Axis(name, {})
    labels = [str(each) for each in value]
    first = {label: number for number, label in reversed([*enumerate(labels)])}
    for number, label in enumerate(labels):
        if first[label] != number:
            reading.refuse((*path, number), "each value once", repr(label))
    places: dict[str, KeyPath] = {label: (*path, number) for number, label in enumerate(labels)}
    return Axis(name, dict(zip(labels, value, strict=True)), places)


def _case(reading: Reading, number: int, matrix: Mapping[str, Any], axes: Mapping[str, Axis]) -> MatrixCase:
    own = matrix["cases"][number]
    path: KeyPath = ("cases", number)
    if any(each and each.get("name") == own["name"] for each in matrix["cases"][:number]):
        reading.refuse((*path, "name"), "a name of its own", repr(own["name"]))
    values = {
        "version": VERSION,
        "name": own["name"],
        "about": own.get("about", matrix.get("about")),
        "job": _case_job(matrix.get("job"), own.get("job")),
        "faults": own["faults"],
        "expect": {**matrix.get("expect", {}), **own.get("expect", {})},
    }
    only: dict[str, tuple[str, ...]] = {}
    for name, labels in own.get("only", {}).items():
        if not isinstance(labels, list) or not labels:
            reading.refuse((*path, "only", name), "a list of labels", shown(labels))
        else:
            only[name] = tuple(str(label) for label in labels)
    _check_uses(reading, path, values, axes, at=())
    return MatrixCase(own["name"], {name: each for name, each in values.items() if each}, only, path)


def _case_job(of_matrix: Any, own: Any) -> Any:
    """Returns the job of a case: the job of the matrix, else the project's, with the fields of the case over it."""
    if own is None:
        return of_matrix
    if of_matrix is None:
        of_matrix = os.path.abspath(PROJECT_FILE) if os.path.exists(PROJECT_FILE) else {}
    base, over = ({FROM: each} if isinstance(each, str) else each for each in (of_matrix, own))
    return {**base, **over}


def _check_uses(reading: Reading, path: KeyPath, value: Any, axes: Mapping[str, Axis], at: KeyPath) -> None:
    """Refuses an axis of mappings outside of ``with: $axis``, and an axis of single values in it."""
    if isinstance(value, dict):
        for key, item in value.items():
            for name in spread_axes(item) if key == SPREAD else ():
                if name in axes and not all(isinstance(one, dict) for one in axes[name].values.values()):
                    expected = "an axis whose values are mappings of fields"
                    reading.refuse((*path, *at, key), expected, repr(f"${name}"))
            scalar = isinstance(item, str) and item.startswith("$") and key != SPREAD
            if scalar and any(isinstance(one, dict) for one in _values(axes, str(item)[1:])):
                reading.refuse((*path, *at, key), "an axis whose values are not mappings", repr(item), "use `with`")
            if key != SPREAD:
                _check_uses(reading, path, item, axes, (*at, key))
    elif isinstance(value, list):
        for number, item in enumerate(value):
            _check_uses(reading, path, item, axes, (*at, number))


def _values(axes: Mapping[str, Axis], name: str) -> Iterable[Any]:
    return axes[name].values.values() if name in axes else ()


def _checked(
    reading: Reading, path: Path, expanded: list[Cell], load: Callable[[Document], LoadedScenario]
) -> tuple[tuple[PlannedCell, ...], tuple[Cell, ...]]:
    planned: list[PlannedCell] = []
    absent: list[Cell] = []
    problems: dict[tuple[str, int, int, str], Problem] = {}
    for cell in expanded:
        try:
            loaded = load(_document(reading, cell))
        except UserError as error:
            wrong = [each for each in error.problems if not _is_absent(each)]
            problems |= {(each.field, each.line, each.column, each.expected): each for each in wrong}
            if not wrong:
                absent.append(cell)
            continue
        whole = replace(cell, values=scenario_plain(loaded.scenario))
        planned.append(PlannedCell(whole, loaded, reading.place(cell.origins[()])[0]))
    there = {label for each in planned for label in each.cell.labels}
    for axis, label in dict.fromkeys(label for cell in absent for label in cell.labels):
        if (axis, label) not in there and not problems:
            origin = next(cell.origins for cell in absent if (axis, label) in cell.labels)[()]
            line, column = reading.place(origin)
            hint = "no stage of any case has it"
            problem = Problem(f"axes.{axis}", "values with a cell", repr(label), hint, str(path), line, column)
            problems[problem.field, line, column, label] = problem
    if problems:
        raise in_order(problems.values())
    return tuple(planned), tuple(absent)


def _is_absent(problem: Problem) -> bool:
    return bool(_ABSENT.fullmatch(problem.field)) and problem.expected.startswith("an action of stage")


def _document(reading: Reading, cell: Cell) -> Document:
    """Returns the scenario of a cell, with the place of each value in the matrix file."""
    known = reading.document.places

    def written(origin: KeyPath) -> KeyPath:
        # A field that holds for every case stands outside of the cases: cases.0.job.stages is written as job.stages.
        return origin[2:] if origin not in known and origin[2:] in known and origin[2:] else origin

    places, key_places = (
        {path: reading.place(written(origin), key=key) for path, origin in cell.origins.items()}
        for key in (False, True)
    )
    return Document(reading.document.source, cell.values, places, key_places)
