"""A pytest plugin: the fixture `bamboo_scenario` runs a scenario as a test.

Rules: every pytest start imports this module, so it imports pytest only. Torch is imported by the process that runs the
scenario; it starts with the first test that uses the fixture. A failure shows the user's test and no code of bamboo.
The test names the file, and its process runs the user's code anyway, so the scenario may name code as with
``--trust-code``.

    def test_we_survive(bamboo_scenario):
        bamboo_scenario("scenarios/first.yaml", "stages=4")
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from engine.core.checks.cell_result import CellResult
    from engine.files.jobs.matrix_file import Matrix
    from engine.runtime.process.fork_client import Lanes

LIMIT_S = 120.0


@pytest.fixture(scope="session")
def bamboo_lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    """The process that runs all scenarios of a session."""
    from engine.harness.matrix_runner import LANE
    from engine.runtime.process.fork_client import Lanes

    with Lanes(LANE, 1, tmp_path_factory.mktemp("bamboo-lane")) as lanes:
        yield lanes


@pytest.fixture
def bamboo_scenario(bamboo_lane: Lanes, tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., CellResult]:
    """Runs a scenario or matrix, with ``FIELD=VALUE`` for its job; one that did not pass fails the test.

    It is a name in the library, or a path, relative to the folder of the test file. Returns the worst result of its
    cells. The run folders are in ``tmp_path / "runs"``.
    """
    from engine.harness.matrix_runner import MatrixRun

    def run(scenario: str | Path, *settings: str, limit_s: float = LIMIT_S) -> CellResult:
        __tracebackhide__ = True
        found = _read(scenario, request.path.parent, settings)
        results = MatrixRun(tmp_path, settings, limit_s, keep=True).run(
            bamboo_lane, found.cells, {each.cell.name: 1.0 for each in found.cells}
        )
        worst = next((each for each in results if each.result != "passed"), results[0])
        if worst.result != "passed":
            _fail("\n".join(_failure(worst, found, settings, tmp_path / "runs")))
        return worst

    return run


def _read(scenario: str | Path, folder: Path, settings: Sequence[str]) -> Matrix:
    """Returns the cells of a scenario or matrix; fails the test with every problem of the file."""
    from engine.core.errors import BambooError
    from engine.files.jobs.library import find_file, library_names
    from engine.files.jobs.matrix_file import read_matrix
    from engine.harness.job_checks import offered
    from engine.runtime.faults.registry import kinds

    __tracebackhide__ = True
    try:
        path = folder / find_file(str(scenario), "scenario", library_names())
        if not path.is_file():
            problem = f"no file {os.path.relpath(path)}: a path is relative to the folder of the test file"
        else:
            return read_matrix(os.path.relpath(path), kinds(), settings, offered.trusting(True))
    except BambooError as error:
        problem = str(error)
    _fail(problem)


def _fail(text: str) -> NoReturn:
    """Fails the test with a text, of which no character steers a terminal."""
    from engine.core.texts import printable

    __tracebackhide__ = True
    pytest.fail(printable(text), pytrace=False)


def _failure(result: CellResult, found: Matrix, settings: Sequence[str], runs: Path) -> Iterator[str]:
    """Yields the lines about a cell that did not pass: the reason, the run folder, the command that runs it again."""
    from engine.core.texts import flags, trust_words
    from engine.files.jobs.job_layers import masked_setting
    from engine.files.jobs.library import is_shipped

    yield f"{result.cell}: {result.verdict}: {result.text}"
    if result.run:
        yield f"run folder: {runs / result.run}"
    name = found.path.stem if is_shipped(found.path) else os.path.relpath(found.path)
    is_scenario = [each.cell.name for each in found.cells] == [found.name]
    words = ["bamboo", "inject", name] if is_scenario else ["bamboo", "matrix", name, "--cell", result.cell]
    words += [*flags("--set", map(masked_setting, settings)), *trust_words(found.foreign)]
    yield f"again: {shlex.join(words)}"
