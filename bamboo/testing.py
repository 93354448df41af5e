"""Scenarios as tests, in any test framework; with pytest the fixture `bamboo_scenario` does the same.

    from bamboo.testing import run_scenario

    def test_we_survive():
        run_scenario("scenarios/first.yaml", "stages=4")

A scenario that does not pass raises `ScenarioFailedError`.
"""

from __future__ import annotations

from engine.api.scenario_tests import CellResult, ScenarioFailedError, run_scenario

__all__ = ["CellResult", "ScenarioFailedError", "run_scenario"]
