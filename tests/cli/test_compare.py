"""`bamboo compare`: two runs, of which one is slower."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer
from typer.testing import CliRunner

from bamboo_cli.compare import compare
from tests.report.made_up import MadeUpRun, make_run

APP = typer.Typer()
APP.command()(compare)


def say(*arguments: object) -> str:
    """Returns the output of the command."""
    done = CliRunner().invoke(APP, [str(each) for each in arguments], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


def test_what_got_slower_is_said_first(tmp_path: Path) -> None:
    a = make_run(tmp_path, MadeUpRun().events(), hour=1)
    b = make_run(tmp_path, MadeUpRun(stages=8).events(), hour=2)
    first, titles, *rows = say(a, "latest", "--results", tmp_path).splitlines()
    assert first.startswith("B is slower in: ")
    assert "step" in first
    assert re.split("  +", titles.strip()) == [
        *("figure", "A n", "B n", "A p50 ms", "B p50 ms", "A p95 ms", "B p95 ms", "ratio", "verdict")
    ]
    assert any(row.startswith("action F ") and row.split()[-1] == "same" for row in rows)
    assert say(a, a).splitlines()[0] == "Nothing got slower."
    assert say(b, a).splitlines()[0] == "Nothing got slower."


def test_as_json_it_is_one_array(tmp_path: Path) -> None:
    a = make_run(tmp_path, MadeUpRun().events())
    (step,) = [row for row in json.loads(say(a, a, "--json")) if row["figure"] == "step"]
    assert (step["a_n"], step["b_n"], step["ratio"], step["verdict"]) == (9, 9, 1.0, "same")
