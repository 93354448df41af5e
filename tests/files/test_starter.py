"""The files of `bamboo init` can be read and run, and replace no file."""

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
from engine.core.errors import StorageError, UserError
from engine.files.jobs.job_file import resolve_job
from engine.files.scenarios.matrix_file import read_matrix
from engine.files.scenarios.scenario_file import load_scenario
from engine.files.scenarios.starter import INSTALL, JOB, SCENARIO, WORKFLOW, starter, workflow, write_new
from engine.runtime.faults.registry import kinds
from tests.matrices import read_each_once

ROOT = Path(__file__).parents[2]


def test_the_files_are_good(tmp_path: Path) -> None:
    assert write_new(tmp_path, starter(with_workflow=True)) == [tmp_path / name for name in (JOB, SCENARIO, WORKFLOW)]
    assert resolve_job(None, {}, project=tmp_path).job.stages == 3
    assert load_scenario(str(tmp_path / SCENARIO), kinds()).scenario.name == "first"
    assert f"- run: {INSTALL}\n" in (tmp_path / WORKFLOW).read_text()


def test_without_a_workflow(tmp_path: Path) -> None:
    write_new(tmp_path, starter(with_workflow=False))
    assert not (tmp_path / ".github").exists()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / JOB).write_text("mine")
    with pytest.raises(UserError, match="no such file yet"):
        write_new(tmp_path, starter(with_workflow=True))
    assert [path.name for path in tmp_path.iterdir()] == [JOB]
    assert (tmp_path / JOB).read_text() == "mine"


def test_a_dangling_link_is_a_file_too(tmp_path: Path) -> None:
    (tmp_path / JOB).symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError):
        write_new(tmp_path, starter(with_workflow=False))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "scenarios").write_text("")
    with pytest.raises(StorageError, match="cannot write"):
        write_new(tmp_path, starter(with_workflow=False))


def test_our_own_workflow_is_that_of_users() -> None:
    assert (ROOT / WORKFLOW).read_text() == workflow("python -m pip install --constraint constraints.txt .")


JOBS = yaml.safe_load(workflow())["jobs"]
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
    text = workflow()
    assert {*re.findall(r"\$\{\{ (.+?) \}\}", text)} == {
        "steps.plan.outputs.matrix",
        "fromJSON(needs.plan.outputs.matrix)",
        "matrix.matrix",
        "matrix.shard",
        "strategy.job-index",
        *(f"github.event_name == 'schedule' && '{weekly}' || '{usual}'" for usual, weekly in CHOICES.values()),
    }
    variables = {name: values[choice] for name, values in CHOICES.items()}
    assert variables.keys() <= yaml.safe_load(text)["env"].keys()
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
