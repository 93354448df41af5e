"""A pytest plugin: the fixture `bamboo_scenario` runs a scenario as a test.

Rules: every pytest start imports this module, so it imports pytest only. Torch is imported by the process that runs the
scenario; it starts with the first test that uses the fixture. A failure shows the user's test and no code of bamboo.
The test names the file, and its process runs the user's code anyway, so the scenario may name code as with
``--trust-code``.

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
    from engine.runtime.process.fork_client import Lanes


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
    from engine.api.scenario_tests import LIMIT_S, ScenarioFailedError, run_scenario

    def run(scenario: str | Path, *settings: str, limit_s: float = LIMIT_S) -> CellResult:
        __tracebackhide__ = True
        places = {"folder": request.path.parent, "runs": tmp_path}
        try:
            return run_scenario(scenario, *settings, limit_s=limit_s, lanes=bamboo_lane, **places)
        except ScenarioFailedError as error:
            why = str(error)
        pytest.fail(why, pytrace=False)

    return run
