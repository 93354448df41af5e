"""`import bamboo`: quick, without torch, and with the names that its types and its page promise."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import bamboo
from engine.api import scenario_tests, training
from engine.core.checks.cell_result import CellResult
from engine.core.errors import UserError
from engine.runtime.process.fork_client import Lanes

ROOT = Path(__file__).parents[2]


def test_every_name_is_there_and_has_a_type() -> None:
    assert all(getattr(bamboo, name) is not None for name in bamboo.__all__)
    assert dir(bamboo) == bamboo.__all__
    typed = (ROOT / "bamboo" / "__init__.pyi").read_text(encoding="utf-8")
    assert {*re.findall(r"import .* as (\w+)", typed)} == {*bamboo.__all__}
    assert (bamboo.train, bamboo.UserError) == (training.train, UserError)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        bamboo.trian  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_loads_nothing_heavy() -> None:
    code = "import sys, bamboo; print(sorted({'torch', 'pandas', 'engine', 'typer'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "[]\n"


def test_what_no_scenario_is_fails_with_its_problem(tmp_path: Path) -> None:
    with pytest.raises(bamboo.testing.ScenarioFailedError, match="did you mean 'kill-middle-stage'"):
        bamboo.testing.run_scenario("kill-midle-stage", folder=tmp_path, runs=tmp_path)


def test_of_the_cells_of_a_matrix_the_worst_one_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = [CellResult("a", "passed", "", ""), CellResult("b", "failed", "mismatch", "the loss is another one")]
    made, lanes = SimpleNamespace(run=lambda *given: results), cast(Lanes, object())
    monkeypatch.setattr(scenario_tests, "MatrixRun", lambda *given, **named: made)
    with pytest.raises(bamboo.testing.ScenarioFailedError, match=r"^b: failed.*the loss is another one"):
        bamboo.testing.run_scenario("kill-middle-stage", runs=tmp_path, lanes=lanes)
