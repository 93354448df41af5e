"""The workflow of `bamboo init --ci github`, executed as by a runner: green; with a bug in the user's model, red."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.files.jobs.starter import JOB, WORKFLOW
from tests.e2e.launcher import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

MODEL = """\
import random
from torch import nn

class Scale(nn.Module):
    def forward(self, x):
        return x * FACTOR

def net():
    return nn.Sequential(nn.Linear(32, 8), Scale(), nn.Linear(8, 8), nn.Linear(8, 10))
"""


@pytest.fixture(name="python", scope="module")
def _python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Python with all that bamboo needs and without bamboo, as a runner with a warm cache has it."""
    home = tmp_path_factory.mktemp("runner")
    venv.create(home / "venv", symlinks=True)
    here = Path(sysconfig.get_path("purelib", vars={"base": str(home / "venv")}))
    packages = [Path(each) for each in sys.path if each.endswith("site-packages")]
    for package in (each for folder in packages for each in folder.iterdir()):
        link = here / package.name
        if "bamboo" not in package.name and package.suffix != ".pth" and not link.exists():
            link.symlink_to(package)
    return home / "venv" / "bin"


@pytest.fixture(name="project")
def _project(tmp_path: Path, python: Path) -> Path:
    """A project with a model of its own, a wheel of bamboo, and the files of `bamboo init --ci github`."""
    folder = tmp_path / "project"
    folder.mkdir()
    build = ["-m", "pip", "wheel", "--quiet", "--no-deps", "--no-index", "--no-build-isolation", "--wheel-dir"]
    source = tmp_path / "source"  # building writes beside its sources
    for package in ("bamboo", "bamboo_cli", "engine", "scenarios"):
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    subprocess.run([sys.executable, *build, str(folder / "wheels"), str(source)], check=True)
    subprocess.run([sys.executable, "-m", "bamboo_cli", "init", "--ci", "github"], cwd=folder, check=True, env=clean())
    job = folder / JOB
    job.write_text(job.read_text().replace("model: mlp", "model: mine:net\ndata_args: {features: 32}"))
    (folder / "mine.py").write_text(MODEL.replace("FACTOR", "0.5"))
    return folder


def clean() -> dict[str, str]:
    """Returns an environment without variables of this checkout, in which pip reaches no index."""
    return {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "PYTHONPATH": str(ROOT), "PIP_NO_INDEX": "1"}


def run_workflow(project: Path, python: Path, skip: str = "") -> dict[str, int]:
    """Runs the commands of a workflow in order, with the shell of a runner; returns the exit code of each step.

    After a step that failed only those with `if: always()` run. Actions of other projects, which check out, set up
    Python and upload, are left out, and so is the step named `skip`.
    """
    found: dict[str, Any] = yaml.safe_load((project / WORKFLOW).read_text())
    environment = clean() | {"PYTHONPATH": "", "PATH": f"{python}:{os.environ['PATH']}", **found["env"]}
    codes: dict[str, int] = {}
    for step in (each for job in found["jobs"].values() for each in job["steps"]):
        is_due = not any(codes.values()) or step.get("if") == "always()"
        name = step.get("name", step.get("run", ""))
        if "run" in step and is_due and name != skip:
            command = ["/bin/bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]
            codes[name] = subprocess.run(command, cwd=project, env=environment, check=False).returncode
    return codes


def test_green_and_with_a_bug_in_the_model_red(project: Path, python: Path) -> None:
    """It installed a package that does not exist, and would have run another model than the user's."""
    codes = run_workflow(project, python)
    assert len(codes) == 6 and not any(codes.values()), codes
    assert 'tests="6" failures="0"' in (project / "cells.xml").read_text()
    assert (project / "results/latest/report.html").exists()
    assert "mine:net" in (project / "results/latest/run.json").read_text()
    installed = subprocess.run(
        [python / "bamboo", "--version"], cwd=project, env=clean() | {"PYTHONPATH": ""}, check=True
    )
    assert installed.returncode == 0
    (project / "mine.py").write_text(MODEL.replace("FACTOR", "random.uniform(0.5, 1.5)"))
    codes = run_workflow(project, python, skip="install bamboo")
    assert codes["bamboo inject scenarios/first.yaml"] != 0, codes
    assert "bamboo matrix scenarios/matrix.yaml --junit cells.xml" not in codes


def test_without_a_place_of_bamboo_the_first_step_says_what_to_do(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "bamboo_cli", "init", "--ci", "github"], cwd=tmp_path, check=True, env=clean()
    )
    steps = yaml.safe_load((tmp_path / WORKFLOW).read_text())["jobs"]["faults"]["steps"]
    install = next(each["run"] for each in steps if each.get("name") == "install bamboo")
    done = subprocess.run(
        ["/bin/bash", "-e", "-c", install], cwd=tmp_path, env=clean(), check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith(f"::error::bamboo is on no public index: set BAMBOO in {WORKFLOW}, or put a wheel")
