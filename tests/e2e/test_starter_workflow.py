"""The workflow of `bamboo init --model ... --ci github`, run as by a runner: green; with a bug in the model, red."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.files.jobs.starter import WORKFLOW
from tests.e2e.launcher import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

MODEL = """\
import random, torch
from torch import nn
from torch.utils.data import TensorDataset

class Scale(nn.Module):
    def forward(self, x):
        return x * FACTOR

def net():
    return nn.Sequential(nn.Linear(32, 8), Scale(), nn.Linear(8, 8), nn.Linear(8, 10))

def rows():
    values = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    return TensorDataset(values, values[:, :10].argmax(dim=1))
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
    words = ["init", "--model", "mine:net", "--data", "mine:rows", "--ci", "github"]
    subprocess.run([sys.executable, "-m", "bamboo_cli", *words], cwd=folder, check=True, env=clean())
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


@pytest.mark.soak
def test_green_and_with_a_bug_in_the_model_red(project: Path, python: Path) -> None:
    """It installed a package that does not exist, and would have run another model than the user's."""
    codes = run_workflow(project, python)
    assert len(codes) == 5 and not any(codes.values()), codes
    assert 'tests="6" failures="0"' in (project / "cells.xml").read_text()
    (page,) = project.glob("results/matrices/*/report.html")
    assert (project / "bamboo.html").read_bytes() == page.read_bytes() and b"mine:net" in page.read_bytes()
    installed = subprocess.run(
        [python / "bamboo", "--version"], cwd=project, env=clean() | {"PYTHONPATH": ""}, check=True
    )
    assert installed.returncode == 0
    (project / "mine.py").write_text(MODEL.replace("FACTOR", "random.uniform(0.5, 1.5)"))
    codes = run_workflow(project, python, skip="install bamboo")
    assert [name for name, code in codes.items() if code] == ["bamboo matrix scenarios/matrix.yaml --junit cells.xml"]
    run = re.findall('name="run" value="(.+?)"', (project / "cells.xml").read_text())[0]  # no cell passes
    (page,) = project.glob(f"results/matrices/*/runs/{run}/report.html")
    assert (project / "bamboo.html").read_bytes() == page.read_bytes(), "the page is not that of the failed cell"


@pytest.fixture(name="command_project")
def _command_project(tmp_path: Path) -> tuple[Path, Path]:
    """A project with the files of `bamboo init --command`, and a folder with its torchrun, a toy, and with bamboo."""
    folder, programs = tmp_path / "project", tmp_path / "programs"
    for path in (folder, programs):
        path.mkdir()
    for name, program in (("bamboo", "-m bamboo_cli"), ("torchrun", str(ROOT / "tests/e2e/toy_launcher.py"))):
        (programs / name).write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} {program} "$@"\n')
        (programs / name).chmod(0o755)
    words = ["init", "--ci", "github", "--limit", "60s", "--command", "torchrun {folder} 60 2"]
    subprocess.run([sys.executable, "-m", "bamboo_cli", *words], cwd=folder, check=True, env=clean())
    return folder, programs


def test_a_command_is_green_and_red_when_its_recovery_is_slower_than_the_limit(
    command_project: tuple[Path, Path],
) -> None:
    folder, programs = command_project
    inject, page = "bamboo inject scenarios/first.yaml --junit cells.xml", "keep the page of the run"
    codes = run_workflow(folder, programs, skip="install bamboo")
    assert not any(codes.values()) and {inject, page} <= codes.keys(), codes
    assert 'tests="1" failures="0"' in (folder / "cells.xml").read_text()
    assert "Passed: all expectations hold." in (folder / "bamboo.html").read_text()
    scenario = folder / "scenarios/first.yaml"
    scenario.write_text(scenario.read_text().replace("max: 60s", "max: 1ms"))
    codes = run_workflow(folder, programs, skip="install bamboo")
    assert {name: code for name, code in codes.items() if code} == {inject: 1}
    assert 'failure type="threshold" message="recovery.max: training stalled for' in (folder / "cells.xml").read_text()
    assert '<h1 class="bad">Recovery.max: training stalled for' in (folder / "bamboo.html").read_text()


@pytest.mark.soak
def test_a_real_torchrun_is_green_with_an_installed_bamboo(project: Path, python: Path) -> None:
    for name in (".github", "scenarios"):
        shutil.rmtree(project / name)
    shutil.copy(ROOT / "docs/examples/any_job.py", project)
    job = "torchrun --standalone --nproc-per-node 2 --max-restarts 1 any_job.py {folder}"
    words = ["init", "--ci", "github", "--command", f"env TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 {job}"]
    subprocess.run([sys.executable, "-m", "bamboo_cli", *words], cwd=project, check=True, env=clean())
    (python / "torchrun").write_text(f'#!/bin/sh\nexec {python}/python -m torch.distributed.run "$@"\n')
    (python / "torchrun").chmod(0o755)
    codes = run_workflow(project, python)
    assert len(codes) == 4 and not any(codes.values()), codes


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
