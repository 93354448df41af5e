"""Every scenario of the library keeps what it promises, as a user runs it: by its bare name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.files.scenario_file import scenario_names
from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(120)]


@pytest.fixture(name="results", scope="module")
def _results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all, so that a twin is run once for all scenarios with the same job."""
    folder: Path = tmp_path_factory.mktemp("results")
    return folder


@pytest.mark.parametrize("name", scenario_names())
def test_a_scenario_passes(launch: Callable[..., Launcher], results: Path, name: str) -> None:
    done = launch("inject", "--scenario", name, "--results", str(results), "--json").wait()
    (case,) = json.loads(done.stdout)["runs"]
    assert [each for each in case["checks"] if each["result"] != "passed"] == []
    assert done.code == 0
