"""A pytest plugin: the fixture `bamboo_scenario` runs a scenario as a test.

Rule: every pytest start imports this module, so it imports pytest only. Torch is imported by the process that runs the
scenario; it starts with the first test that uses the fixture.

    def test_we_survive(bamboo_scenario):
        bamboo_scenario("scenarios/first.yaml", "stages=4")
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from engine.core.checks.cell_result import CellResult
    from engine.runtime.process.lanes import Lanes

LIMIT_S = 120.0


@pytest.fixture(scope="session")
def bamboo_lane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lanes]:
    """The process that runs all scenarios of a session."""
    from engine.harness.matrix_runner import LANE
    from engine.runtime.process.lanes import Lanes

    with Lanes(LANE, 1, tmp_path_factory.mktemp("bamboo-lane")) as lanes:
        yield lanes


@pytest.fixture
def bamboo_scenario(bamboo_lane: Lanes, tmp_path: Path) -> Callable[..., CellResult]:
    """Runs a scenario, by path or library name, with ``FIELD=VALUE`` for its job; a failed scenario fails the test.

    Returns the worst result of its cells. The run folder is below ``tmp_path``.
    """
    from engine.files.scenarios.matrix_file import read_matrix
    from engine.harness.job_checks import offered
    from engine.harness.matrix_runner import MatrixRun
    from engine.runtime.faults.registry import kinds

    def run(scenario: str | Path, *settings: str, limit_s: float = LIMIT_S) -> CellResult:
        found = read_matrix(str(scenario), kinds(), settings, offered)
        results = MatrixRun(tmp_path, settings, limit_s, keep=True).run(
            bamboo_lane, found.cells, {each.cell.name: 1.0 for each in found.cells}
        )
        worst = next((each for each in results if each.result != "passed"), results[0])
        if worst.result != "passed":
            kind = f" ({worst.failure})" if worst.failure else ""
            pytest.fail(f"{worst.cell}: {worst.result}{kind}: {worst.text}", pytrace=False)
        return worst

    return run
