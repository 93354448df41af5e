"""Completion in bash, zsh and fish, through the protocol that the shells speak: values, and no heavy import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.files.jobs.library import library_names, scenario_names
from engine.models.model_registry import DATA, MODELS
from engine.report.load import TABLES
from tests.cli.test_status import ENDED, make_run

ROOT = Path(__file__).parents[2]
PROGRAM = "import sys; sys.argv = ['bamboo']; from bamboo_cli.__main__ import main; main()"
HEAVY = ("torch", "yaml", "pandas", "numpy", "pydantic", "rich", "psutil")


def complete(folder: Path, line: str, shell: str = "bash", **environment: str) -> list[str]:
    """Returns the values that a shell would offer for the last word of a line, in `folder`."""
    words = line.split(" ")
    told = {"bash": {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}}
    told["zsh"] = {"_TYPER_COMPLETE_ARGS": line}
    told["fish"] = {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", PROGRAM],
        cwd=folder,
        env={
            **{"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), "_BAMBOO_COMPLETE": f"complete_{shell}"},
            **told[shell],
            **environment,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert imported & {*HEAVY} == set()
    return [line for line in done.stdout.splitlines() if line]


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("bamboo inject ", scenario_names()),
        ("bamboo inject --scenario kill-m", ["kill-middle-stage"]),
        ("bamboo matrix ", library_names()),
        ("bamboo validate matrix-s", ["matrix-smoke"]),
        ("bamboo run --model ", [*MODELS]),
        ("bamboo run --data ", ["auto", *DATA]),
        ("bamboo run --schedule z", ["zb1p", "zb2p", "zbv"]),
        ("bamboo schedule show --schedule 1", ["1f1b"]),
        ("bamboo run --redundancy ", ["none", "lazy", "eager", "reroute"]),
        ("bamboo report --table ", [*TABLES]),
        (
            "bamboo list ",
            ["scenarios", "matrices", "models", "data", "schedules", "optimizers", "lr-schedules", "runs"],
        ),
    ],
)
def test_names_are_completed(tmp_path: Path, line: str, values: list[str]) -> None:
    assert complete(tmp_path, line) == values


def test_runs_are_completed_the_newest_first(tmp_path: Path) -> None:
    older = make_run(tmp_path / "results", "mlp", ENDED)
    newer = make_run(tmp_path / "results", "mlp", ENDED, hour=2)
    for command in ("report", "status", "compare", "inject --run"):
        assert complete(tmp_path, f"bamboo {command} ") == ["latest", newer, older]
    assert complete(tmp_path, "bamboo status --results none ") == []
    assert complete(tmp_path, "bamboo report 20260101-01", BAMBOO_RESULTS=str(tmp_path / "results")) == [older]


def test_files_of_the_user_are_completed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("first.yaml", "notes.md", "mine/second.yaml", "mine/job.yml", "words.txt"):
        (tmp_path / name).touch()
    assert complete(tmp_path, "bamboo inject fi") == ["first.yaml"]
    assert complete(tmp_path, "bamboo run mi") == ["mine/"]
    assert complete(tmp_path, "bamboo run mine/") == ["mine/job.yml", "mine/second.yaml"]
    assert complete(tmp_path, "bamboo run --data w") == ["words.txt"]


def test_zsh_and_fish_are_told_the_same(tmp_path: Path) -> None:
    for shell in ("zsh", "fish"):
        (shown,) = complete(tmp_path, "bamboo inject kill-mid", shell)
        assert "kill-middle-stage" in shown
