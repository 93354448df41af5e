"""`bamboo compare`: two runs, of which one is slower."""

from __future__ import annotations

import json
import re
from pathlib import Path

import typer
from typer.testing import CliRunner

from bamboo_cli.compare import compare
from tests.files.test_named_weights import NEW, OLD, OTHER
from tests.files.test_named_weights import make as make_weights
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
    make_run(tmp_path, MadeUpRun(stages=8).events(), hour=2)
    jobs, first, titles, *rows = say(a, "latest", "--results", tmp_path).splitlines()
    assert jobs == "The jobs differ: stages 4 and 8."
    assert first.startswith("B is slower in: ")
    assert "step" in first
    assert re.split("  +", titles.strip()) == [
        *("figure", "A n", "B n", "A p50 ms", "B p50 ms", "A p95 ms", "B p95 ms", "ratio", "verdict")
    ]
    assert any(row.startswith("action F ") and row.split()[-1] == "same" for row in rows)
    assert say(a, a).splitlines()[0] == "Nothing got slower."


def test_jobs_that_differ_are_told_before_their_figures(tmp_path: Path) -> None:
    """The comparison of a large job with a small one said "Nothing got slower." and no word more."""
    events = MadeUpRun().events()
    a = make_run(tmp_path, events, hour=1)
    changed = {"model": "gpt", "model_args": {"depth": 2}, "name": "other", "results": "elsewhere"}
    b = make_run(tmp_path, [events[0] | changed, *events[1:]], hour=2)
    text = "The jobs differ: model mlp and gpt; model_args.width 64 and unset; model_args.depth unset and 2."
    assert say(a, b).splitlines()[:2] == [text, "Nothing got slower."]
    found = json.loads(say(a, b, "--json"))
    assert found["different_fields"] == {
        "model": ["mlp", "gpt"],
        "model_args.width": [64, None],
        "model_args.depth": [None, 2],
    }


def test_a_run_that_did_not_pass_is_told_before_its_figures(tmp_path: Path) -> None:
    *told, ended = MadeUpRun().events()
    a = make_run(tmp_path, [*told, ended], hour=1)
    b = make_run(tmp_path, [*told, ended | {"outcome": "failed", "exit_code": 1}], hour=2)
    assert say(a, b).splitlines()[:2] == [f"B: {b.name} has failed: failed", "Nothing got slower."]


def test_as_json_it_is_one_object(tmp_path: Path) -> None:
    a = make_run(tmp_path, MadeUpRun().events())
    found = json.loads(say(a, a, "--json"))
    (step,) = [row for row in found["figures"] if row["figure"] == "step"]
    assert (step["a_n"], step["b_n"], step["ratio"], step["verdict"]) == (9, 9, 1.0, "same")
    assert (found["different_fields"], found["not_passed"]) == ({}, {})


def test_weights_are_compared_instead_and_the_exit_code_says_if_they_differ(tmp_path: Path) -> None:
    make_weights(tmp_path, OLD, range(9), kept=(8,))
    make_weights(tmp_path, NEW, range(4, 9), kept=(8,), after=OLD)
    make_weights(tmp_path, OTHER, range(9), kept=(8,), wrong_from=6)
    where = ["--weights", "--results", str(tmp_path)]
    done = CliRunner().invoke(APP, [OLD, NEW, *where], catch_exceptions=False)
    assert (done.exit_code, done.stdout.splitlines()[0]) == (
        0,
        "equal: 18 of 18 rows in 9 steps, up to step 8, are equal",
    )
    done = CliRunner().invoke(APP, [OLD, OTHER, *where, "--json"], catch_exceptions=False)
    found = json.loads(done.stdout)
    assert (done.exit_code, found["exit_code"], found["equal"], found["rows"]["last"]) == (1, 1, False, 8)
    assert (found["first_row"].startswith("step 6, layer 1: "), found["first_tensor"]["tensor"]) == (True, "weight/w")
