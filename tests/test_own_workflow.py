"""The workflow of this repository runs the shipped matrices in parts; its commands are executed."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.files.jobs.matrix_file import read_matrix
from engine.runtime.faults.registry import kinds
from tests.matrices import read_each_once

WORKFLOW = (Path(__file__).parents[1] / ".github/workflows/fault-matrix.yml").read_text()
JOBS = yaml.safe_load(WORKFLOW)["jobs"]
PLAN, CELLS = ([each for each in JOBS[name]["steps"] if "bamboo matrix" in each.get("run", "")] for name in JOBS)


def run_step(script: str, folder: Path, bamboo: Path, **variables: str) -> tuple[int, str]:
    """Runs a step as a GitHub runner does; returns its exit code and its outputs for later jobs."""
    output = folder / "output"
    output.touch()
    environment = {"PATH": f"{bamboo}:{os.environ['PATH']}", "GITHUB_OUTPUT": str(output), **variables}
    (folder / "step.sh").write_text(script)
    done = subprocess.run(["/bin/bash", "-e", str(folder / "step.sh")], env=environment, check=False, cwd=folder)
    return done.returncode, output.read_text()


# The values that a runner gives the variables at the top, for a pull request and for the weekly schedule.
CHOICES = {"MATRIX": ("matrix-smoke", "matrix-full"), "SHARDS": ("2", "8")}


@pytest.mark.parametrize("choice", [0, 1])
def test_the_workflow_means_what_a_runner_reads(tmp_path: Path, choice: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its expressions name values that exist, its commands are commands of bamboo, and its jobs run every cell once."""
    read_each_once(monkeypatch)
    assert {*re.findall(r"\$\{\{ (.+?) \}\}", WORKFLOW)} == {
        "steps.plan.outputs.matrix",
        "fromJSON(needs.plan.outputs.matrix)",
        "matrix.matrix",
        "matrix.shard",
        "strategy.job-index",
        *(f"github.event_name == 'schedule' && '{weekly}' || '{usual}'" for usual, weekly in CHOICES.values()),
    }
    variables = {name: values[choice] for name, values in CHOICES.items()}
    assert variables.keys() <= yaml.safe_load(WORKFLOW)["env"].keys()
    assert (PLAN[0]["id"], [*JOBS["plan"]["outputs"]], JOBS["cells"]["needs"]) == ("plan", ["matrix"], "plan")
    code, output = run_step(PLAN[0]["run"], tmp_path, Path(sys.executable).parent, **variables)
    name, _, value = output.partition("=")
    assert (code, name) == (0, "matrix")
    cells: list[str] = []
    for job in json.loads(value)["include"]:
        command = CELLS[0]["run"].replace("${{ matrix.matrix }}", job["matrix"])
        words = shlex.split(command.replace("${{ matrix.shard }}", job["shard"]))
        done = CliRunner().invoke(app, [*words[1:], "--format", "list"], catch_exceptions=False)
        assert (words[0], done.exit_code, len(done.output.splitlines())) == ("bamboo", 0, job["cells"])
        cells += done.output.splitlines()
    assert sorted(cells) == sorted(each.cell.name for each in read_matrix(variables["MATRIX"], kinds()).cells)


def test_a_plan_that_fails_fails_its_job(tmp_path: Path) -> None:
    (tmp_path / "bamboo").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "bamboo").chmod(0o755)
    assert run_step(PLAN[0]["run"], tmp_path, tmp_path) == (2, "")


VERSIONS = yaml.safe_load((Path(__file__).parents[1] / ".github/workflows/versions.yml").read_text())["jobs"]["test"]


OF_ONE_TORCH = ("setuptools==", "torch==")


def test_the_oldest_and_the_newest_versions_run_each_week(tmp_path: Path) -> None:
    """The first row has the bounds of pyproject.toml, and each row leaves the pins that fit to all versions."""
    root = Path(__file__).parents[1]
    bounds = (root / "pyproject.toml").read_text()
    rows = VERSIONS["strategy"]["matrix"]["include"]
    for bound in (f'requires-python = ">={rows[0]["python"]}"', f'"torch>={rows[0]["torch"].removesuffix(".*")}"'):
        assert bound in bounds
    (replaced,) = [each["run"] for each in VERSIONS["steps"] if "constraints.txt" in each.get("run", "")]
    pins = [each for each in (root / "constraints.txt").read_text().splitlines() if not each.startswith(OF_ONE_TORCH)]
    before = "\n".join([*pins, *(f"{each}0" for each in OF_ONE_TORCH), ""])  # this runs where they were replaced, too
    for row in rows:
        (tmp_path / "constraints.txt").write_text(before)
        run_step(replaced, tmp_path, Path(sys.executable).parent, TORCH=row["torch"])
        now = (tmp_path / "constraints.txt").read_text().splitlines()
        assert [each for each in now if each.startswith("torch==")] == [f"torch=={row['torch']}"] * bool(row["torch"])
        assert len(before.splitlines()) - len(now) == 1 + (not row["torch"])
