"""The judgement of a run as its users meet it: in its events, in report, page and status, and in exit codes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launcher import ROOT, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., Launcher]

SMALL = ("run", "--stages", "3", "--microbatches", "4", "--steps", "6", "--validate-every", "0", "--kill", "3:1")
NOISY = """
import random
from torch import nn

class Noisy(nn.Linear):
    def forward(self, x):
        return super().forward(x) * (1 + random.random() / 10)

def model():
    return nn.Sequential(nn.Flatten(), Noisy(64, 32), nn.ReLU(), nn.Linear(32, 10))
"""


def say(launcher: Launcher, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in the folder of a launch."""
    return subprocess.run(
        [sys.executable, "-m", "bamboo_cli", *arguments],
        cwd=launcher.folder,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def after_training(launcher: Launcher) -> list[str]:
    """Returns the kinds of events that follow the end of training."""
    kinds = [each["event"] for each in launcher.events()]
    return kinds[kinds.index("training_ended") :]


def test_a_run_whose_weights_differ_is_red_everywhere(launch: Launch, tmp_path: Path) -> None:
    """Such a run, which ends with 1, was green in report, page and status, and passed ``--fail-if``."""
    (tmp_path / "noisy.py").write_text(NOISY)
    noisy = ("--model", "noisy:model", "--data", "digits", "--no-check-pure")
    launcher = launch(*SMALL, *noisy, PYTHONPATH=f"{ROOT}:{tmp_path}")
    assert launcher.wait().code == 1
    assert after_training(launcher) == [
        *("training_ended", "comparing", "twin", "comparison"),
        *(4 * ["check"]),
        *("verdict", "seal", "ended"),
    ]
    (ended,), (verdict,), (found,) = (launcher.events(kind) for kind in ("ended", "verdict", "comparison"))
    assert (ended["outcome"], ended["exit_code"]) == ("failed", 1)
    assert (verdict["result"], verdict["exit_code"]) == ("failed", 1)
    assert (found["compared"], found["steps"], found["last_step"], found["disturbed"]) == (6, 6, 5, 3)
    where = {"step": 0, "layer": 1, "part": "weights or optimizer state", "tensor": "weight"}
    assert found["difference"].items() >= where.items()
    wrong = "Failed: the weights are not those of the fault-free twin: step 0, layer 1, tensor weight"
    why = "it differs before the fault of step 3: the model is not deterministic"
    reported = say(launcher, "report", "--fail-if", "recovery.step.count > 5")
    assert wrong in reported.stdout
    assert why in reported.stdout
    assert reported.returncode == 1
    page = (launcher.run_folder / "report.html").read_text()
    assert re.search(r'class="[^"]*\bbad\b', page)
    assert wrong in page
    shown = say(launcher, "status").stdout
    assert ": failed, epoch 2, step 6 of 6" in shown
    assert "check trajectory failed: the weights are not those" in shown
    assert json.loads((launcher.run_folder / "run.json").read_text())["result"]["outcome"] == "failed"


def test_a_launcher_killed_beside_the_twin_leaves_a_complete_training_without_a_verdict(launch: Launch) -> None:
    launcher = launch(*SMALL, "--model", "timed", "--set", "model_args.forward_ms=60")  # the twin outlasts a command
    launcher.wait_until(lambda: launcher.events("comparing"))
    shown = say(launcher, "status").stdout
    assert ": comparing with the twin, epoch 2, step 6 of 6" in shown
    launcher.process.kill()
    gone = say(launcher, "status")
    assert (gone.returncode, ": launcher gone, epoch 2, step 6 of 6" in gone.stdout) == (69, True)
    assert "training had ended" in gone.stderr
    reported = say(launcher, "report")
    assert "All 6 steps were committed" in reported.stdout
    assert "Weights not compared: the run has no verdict yet." in reported.stdout
    assert after_training(launcher) == ["training_ended", "comparing"]
