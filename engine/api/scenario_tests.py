"""Scenarios and matrices run as tests: returns the worst result of their cells, or raises how to run it again."""

from __future__ import annotations

import contextlib
import os
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.core.checks.cell_result import CellResult
from engine.core.errors import BambooError
from engine.core.texts import flags, printable, trust_words
from engine.files.jobs.job_layers import masked_setting
from engine.files.jobs.library import find_file, is_shipped, library_names
from engine.files.jobs.matrix_file import Matrix, read_matrix
from engine.harness.job_checks import offered
from engine.harness.matrix_runner import LANE, MatrixRun
from engine.runtime.faults.registry import kinds
from engine.runtime.process.fork_client import Lanes

__all__ = ["LIMIT_S", "CellResult", "ScenarioFailedError", "run_scenario"]

LIMIT_S = 120.0


class ScenarioFailedError(AssertionError):
    """A scenario did not pass, or could not run; the text names the run folder and the command that runs it again.

    The text cannot control a terminal.
    """

    def __init__(self, text: str):
        super().__init__(printable(text))


def run_scenario(
    scenario: str | Path,
    *settings: str,
    limit_s: float = LIMIT_S,
    folder: Path | None = None,
    runs: Path | None = None,
    lanes: Lanes | None = None,
) -> CellResult:
    """Runs a scenario or matrix, with ``FIELD=VALUE`` for its job, and returns the worst result of its cells.

    `scenario` is a shipped name, or a path relative to `folder` (default: the working directory). Run folders are in
    ``runs / "runs"``, by default a temporary folder that is kept. `lanes` are warm processes to run cases, if there are
    any. The caller's test names the file, so the file may name code, as with ``--trust-code``.

    Raises ScenarioFailedError if a cell did not pass, or the file is wrong, with every problem of it.
    """
    matrix = _read(scenario, folder or Path.cwd(), settings)
    place = runs or Path(tempfile.mkdtemp(prefix="bamboo-scenario-"))
    with contextlib.ExitStack() as stack:
        own = lanes or stack.enter_context(Lanes(LANE, 1, Path(stack.enter_context(tempfile.TemporaryDirectory()))))
        cells = {planned.cell.name: 1.0 for planned in matrix.cells}
        results = MatrixRun(place, settings, limit_s, keep=True).run(own, matrix.cells, cells)
    worst = next((result for result in results if result.result != "passed"), results[0])
    if worst.result != "passed":
        raise ScenarioFailedError("\n".join(_failure(worst, matrix, settings, place / "runs")))
    return worst


def _read(scenario: str | Path, folder: Path, settings: Sequence[str]) -> Matrix:
    """Returns the cells of a scenario or matrix; raises ScenarioFailedError with every problem of the file."""
    try:
        path = folder / find_file(str(scenario), "scenario", library_names())
        if path.is_file():
            return read_matrix(os.path.relpath(path), kinds(), settings, offered.trusting(True))
        problem = f"no file {os.path.relpath(path)}: a path is relative to the folder of the test file"
    except BambooError as error:
        problem = str(error)
    raise ScenarioFailedError(problem)


def _failure(result: CellResult, matrix: Matrix, settings: Sequence[str], runs: Path) -> Iterator[str]:
    """Yields the lines about a failed cell: the reason, the run folder, the command that runs it again."""
    yield f"{result.cell}: {result.verdict}: {result.text}"
    if result.run:
        yield f"run folder: {runs / result.run}"
    name = matrix.path.stem if is_shipped(matrix.path) else os.path.relpath(matrix.path)
    is_scenario = [planned.cell.name for planned in matrix.cells] == [matrix.name]
    words = ["bamboo", "inject", name] if is_scenario else ["bamboo", "matrix", name, "--cell", result.cell]
    words += [*flags("--set", map(masked_setting, settings)), *trust_words(matrix.foreign)]
    yield f"again: {shlex.join(words)}"
