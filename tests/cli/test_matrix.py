"""`bamboo matrix` without runs: lists, workflow matrices, shards and refusals; and `bamboo init`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from bamboo_cli.init import init
from bamboo_cli.matrix import matrix
from engine.core.checks.cell_result import CellResult
from engine.core.errors import NothingMatchedError, UserError
from engine.files.matrix_results import append_result
from tests.matrices import read_each_once

ROOT = Path(__file__).parents[2]
APP = typer.Typer()
APP.command()(matrix)
APP.command()(init)


def lines(*arguments: str) -> list[str]:
    done = CliRunner().invoke(APP, ["matrix", *arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


def test_the_shards_are_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    read_each_once(monkeypatch)
    whole = lines("matrix-full", "--format", "list")
    parts = [lines("matrix-full", "--format", "list", "--shard", f"{number}/5") for number in range(1, 6)]
    assert len(whole) == 972
    assert sorted(name for part in parts for name in part) == sorted(whole)


def test_a_workflow_matrix() -> None:
    (line,) = lines("matrix-full", "--format", "github", "--shards", "1000")
    entries = json.loads(line)["include"]
    assert len(entries) == 256
    assert sum(each["cells"] for each in entries) == 972
    assert entries[2]["shard"] == "3/256"


def test_a_part_has_no_workflow_matrix_of_its_own() -> None:
    with pytest.raises(UserError, match="expected no part with --format github"):
        CliRunner().invoke(
            APP, ["matrix", "matrix-smoke", "--format", "github", "--shard", "3/8"], catch_exceptions=False
        )


def test_shards_of_some_cells() -> None:
    (line,) = lines("matrix-smoke", "--format", "github", "--cell", "during/", "--shards", "8")
    assert [each["cells"] for each in json.loads(line)["include"]] == [1, 1, 1]


def test_earlier_times_balance_the_shards(tmp_path: Path) -> None:
    slow, *others = lines("matrix-smoke", "--format", "list")
    assert json.loads("".join(lines("matrix-smoke", "--format", "list", "--json"))) == {"cells": [slow, *others]}
    append_result(tmp_path, CellResult(slow, "passed", "", "", "kill", 1000.0, 0, ""))
    append_result(tmp_path, CellResult(others[0], "passed", "", "", "kill", 1.0, 0, ""))
    append_result(tmp_path, CellResult(others[1], "passed", "", "", "kill", 1.0, 0, ""))
    assert lines("matrix-smoke", "--format", "list", "--shard", "1/2", "--times", str(tmp_path)) == [slow]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        (["matrix-smoke", "--shard", "9/8"], UserError, "a part such as 3/8"),
        (["matrix-smoke", "--cell", "nothing"], NothingMatchedError, "no cell of matrix-smoke has 'nothing'"),
        (["matrix-smoke", "--times", "/nowhere/at/all"], UserError, "--times: expected an existing file"),
        (["matrix-smoke", "--set", "stages=0"], UserError, "stages"),
        (["/nowhere/m.yaml"], UserError, "a file that can be read"),
    ],
)
def test_refusals(arguments: list[str], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        CliRunner().invoke(APP, ["matrix", *arguments], catch_exceptions=False)


def test_there_is_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(NothingMatchedError, match="to resume"):
        CliRunner().invoke(
            APP, ["matrix", "matrix-smoke", "--resume", "--results", str(tmp_path)], catch_exceptions=False
        )


def test_the_pytest_plugin_loads_nothing_heavy() -> None:
    heavy = "print([each for each in ('torch', 'pandas', 'yaml', 'typer') if each in sys.modules])"
    code = f"import bamboo_cli.pytest_plugin, sys; {heavy}"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
