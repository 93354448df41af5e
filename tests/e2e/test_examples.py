"""The worked examples: the commands of their page, in small, and the results that the page promises."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine import dry_run
from tests.e2e.launcher import ROOT

EXAMPLES = ROOT / "docs" / "examples"
COMMANDS = re.findall(r"^    bamboo (.*)$", (EXAMPLES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
SMALL = {
    "digits": "--set data_args.count=48 --microbatches 4 --kill 2:1",
    "resnet": "--set data_args.count=48 --set model_args.width=2 --microbatches 4 --kill 2:1:B:2",
    "gpt": "--set data_args.sequence=16 --microbatches 2 --microbatch-size 2 --steps 6 --warmup-steps 0 "
    "--checkpoint-every 2 --kill 3:2",
}
# As in a folder where bamboo is not installed.
WITHOUT_BAMBOO = (
    "import runpy, sys\nsys.modules.update(dict.fromkeys(('engine', 'bamboo_cli')))\nsys.argv = sys.argv[1:]"
)


@pytest.fixture(name="folder")
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copies the examples, and goes there."""
    folder = tmp_path / "try"
    shutil.copytree(EXAMPLES, folder)
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(folder)
    for name in ("digits", "resnet", "gpt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def shown(start: str) -> str:
    """Returns the command of the page that begins so."""
    (command,) = [each for each in COMMANDS if each.startswith(start)]
    return str(command)


def bamboo(command: str) -> dict[str, Any]:
    """Runs a command in this process; returns its JSON."""
    done = CliRunner().invoke(app, [*shlex.split(command), "--json"])
    assert done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def trained(name: str) -> dict[str, Any]:
    """Runs the example's command with fewer and smaller steps, and a kill that its twin does not show."""
    result = bamboo(re.sub(r" --kill \S+", "", shown(f"run --model {name}")) + f" {SMALL[name]} --in-process")
    assert result["twin"] == {"steps_compared": result["steps"], "difference": None}
    assert [each["culprits"] for each in result["recoveries"]] in ([[1]], [[2]])
    return result


def plain_torch(*arguments: str) -> str:
    """Runs a program that can import neither engine nor bamboo_cli; returns its output."""
    code = f"{WITHOUT_BAMBOO}\nrunpy.run_path(sys.argv[0], run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.soak
def test_digits_count_epochs_metrics_and_a_kill(folder: Path) -> None:
    result = trained("digits")
    assert result["steps"] * 4 * 4 == 6 * 48
    (test,) = result["evaluations"]
    assert (test["name"], test["samples"], sorted(test["metrics"])) == ("test", 6, ["accuracy", "top2"])
    with (Path(result["run_dir"]) / "logged.csv").open(newline="") as file:
        steps = [row["step"] for row in csv.DictReader(file) if row["loss"]]
    assert steps == [str(step) for step in range(result["steps"])]


@pytest.mark.soak
def test_a_resnet_with_groups_survives_a_kill(folder: Path) -> None:
    assert trained("resnet")["kept"] == 4 * 48 // (4 * 4) - 1


def test_a_gpt_is_killed_resumed_exported_and_generates_in_plain_torch(folder: Path) -> None:
    result = trained("gpt")
    assert result["loss_last"] < result["loss_first"]
    bamboo(f"export {Path(result['run_dir']).name} --output first.pt")
    bamboo(shown("run --resume").replace("@199", "@3") + " --in-process")
    bamboo(shown("export"))
    first, second = torch.load("first.pt", weights_only=True), torch.load("gpt.pt", weights_only=True)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)

    from gpt import GPT  # type: ignore[import-not-found]

    model = GPT()
    model.load_state_dict(second)
    assert plain_torch("generate.py", "gpt.pt", "Shall I") == model.generate("Shall I", 200) + "\n"


def test_the_page_for_users_of_torchrun_has_a_job_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "python.md").read_text(encoding="utf-8").partition("## From a torchrun script")[2]
    usual, module, program = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (job,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    (command,) = re.findall(r"^    bamboo (.*)$", page, re.MULTILINE)
    compile(usual, "page", "exec")
    (tmp_path / "mine.py").write_text(module)
    (tmp_path / "job.yaml").write_text(job)
    (tmp_path / "train_mine.py").write_text(program)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    result = bamboo(command.replace("--kill 9:1", "--kill 1:1 --set epochs=0 --steps 2 --in-process"))
    assert result["twin"] == {"steps_compared": 2, "difference": None}
    arguments = re.search(r"train\((.*?)\s*\)\n", program, re.DOTALL)
    assert arguments
    names = {"mine": importlib.import_module("mine"), "dry_run": dry_run}
    assert "D=2 pipelines" in eval(f"dry_run({arguments[1]})", names)  # noqa: S307


@pytest.mark.soak
def test_the_story_runs_from_cell_to_cell(folder: Path) -> None:
    done = subprocess.run([sys.executable, "gpt_story.py", "60"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout and "interrupted" in done.stdout and "Shall I" in done.stdout
