"""Training from a Python program: the runs, figures and errors of the command line, and an end with the program."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine import dry_run, train
from engine.core.errors import BambooError, UserCodeError, UserError
from engine.core.history.run_records import CommitRecord, FaultRecord
from engine.files.run_folder import RunFolder
from engine.harness.dead_runs import live_runs
from engine.observers.loggers import FILE, StepDone
from engine.report.load import TABLES
from tests.e2e.launcher import ROOT
from tests.runtime.test_hugging_face import folder_of

MINE = """
import time
from torch import nn

def small(width: int = 16):
    return nn.Sequential(nn.Linear(32, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 10))

def breaks():
    raise RuntimeError("no model today")

class Slept(nn.Linear):
    def forward(self, x):
        time.sleep(0.005)
        return super().forward(x)

def slow():
    return nn.Sequential(Slept(32, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

net = small()

class Full:
    def step(self, done):
        raise RuntimeError("the logger is full")
"""
SCRIPT = """
import sys
from engine import train

def own():
    import time
    from torch import nn

    class Slept(nn.Linear):
        def forward(self, x):
            time.sleep(0.005)
            return super().forward(x)

    return nn.Sequential(Slept(32, 8), nn.Linear(8, 10))

{guard}
    run = train(own, stages=2, steps=100_000, quiet=True, in_process=True)
    print(run.folder, flush=True)
    run.wait()
"""


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def csv_of(run: str, table: str) -> str:
    return CliRunner().invoke(app, ["report", run, "--table", table, "--format", "csv"]).stdout


def test_a_run_is_killed_from_outside_read_and_stopped() -> None:
    import mine  # type: ignore[import-not-found]

    steps: list[StepDone] = []
    run = train(mine.slow, stages=3, steps=100_000, events_max="20MB", callbacks=[steps.append], quiet=True)
    with pytest.raises(TimeoutError):
        run.wait(0.01)
    case = run.kill(1)
    culprits = [each["culprits"] for each in case["recoveries"]]  # a move of stages by measured times has none
    assert case["verdict"] == "passed" and [each for each in culprits if each] == [[1]]
    assert run.status().phase == "training" or run.status().committed > 0
    stopped = run.stop()
    assert (stopped.outcome, stopped.exit_code) == ("interrupted", 130) and stopped.steps > 2
    assert run.result == stopped and live_runs(Path("results")) == []
    with pytest.raises(BambooError) as caught:
        run.wait()
    assert caught.value.exit_code == 130
    kinds = [type(each) for each in run.events()]
    assert kinds.count(FaultRecord) == 1 and kinds.count(CommitRecord) == stopped.steps == len(steps)
    assert steps[-1].loss == stopped.loss and [each.step for each in steps if each.recoveries]
    for name in TABLES:
        assert run.table(name).to_csv(index=False, lineterminator="\n") == csv_of(run.name, name), name
    weights = run.weights()
    assert weights["0.weight"].shape == (16, 32) and weights.keys() == mine.small().state_dict().keys()


def test_a_kill_a_twin_a_module_with_its_weights_and_a_logger_that_raises() -> None:
    import mine

    with torch.no_grad():
        mine.net[0].weight.fill_(0.25)
    logger = ["csv", mine.Full]
    with train(mine.net, stages=2, steps=6, in_process=True, quiet=True, logger=logger, kills=["3:1"]) as run:
        pass
    # The twin has no logger.
    assert run.result is not None and run.result.twin == {"steps_compared": 6, "difference": None}
    whole, full = run.result.plain["loggers"]
    assert (whole["whole"], full["whole"], full["last_step"]) == (True, False, -1) and "is full" in full["error"]
    rows = (run.folder / FILE).read_text().splitlines()
    assert len(rows) == 1 + 6 + 1 + 1 + 6  # titles, steps, recovery, validation, times of steps
    assert re.fullmatch(r"0,+wall=[0-9.]+ data=[0-9.]+ forward=[0-9.]+ backward=.*", rows[-6])
    init = Path(json.loads(RunFolder(run.folder).run_json.read_text())["init"]["file"])
    assert init.parent == Path("results") and init.name.startswith("init-")


@pytest.mark.soak
def test_a_model_of_transformers_is_trained(tmp_path: Path) -> None:
    args: dict[str, Any] = {"hf": folder_of(tmp_path / "model"), "hf_random": True, "data": Path("a.txt"), "stages": 2}
    (tmp_path / "a.txt").write_text("1 2 3 4 5 6 7 8 9 10 " * 200)
    args["data_args"] = {"length": 16}
    assert "2 stages" in dry_run(**args)
    with train(**args, steps=2, in_process=True, quiet=True, twin=False) as run:
        pass
    assert run.result is not None and (run.result.outcome, run.result.steps) == ("finished", 2)
    assert "lm_head.weight" in run.weights()


def test_mistakes_are_raised_as_the_command_line_says_them(capfd: pytest.CaptureFixture[str]) -> None:
    import mine

    shown = CliRunner().invoke(app, ["run", "--dry-run", "--stages", "2", "--microbatches", "2"]).stdout
    assert dry_run(stages=2, microbatches=2) == shown
    with pytest.raises(UserError) as caught:
        train(mine.small, stages=0, widht=3, lr="much")
    assert [each.source for each in caught.value.problems] == ["train()"] * 3
    assert "train(): lr: expected a number, found 'much'" in str(caught.value)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.soak)])
def test_a_run_ends_with_the_program_that_started_it(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(guard='if __name__ == "__main__":'))
    program = subprocess.Popen([sys.executable, "script.py"], stdout=subprocess.PIPE, text=True)
    assert program.stdout is not None
    folder = RunFolder(Path(program.stdout.readline().strip()))
    until_s = time.monotonic() + 60.0
    while "commit" not in (folder.events.read_text() if folder.events.exists() else ""):
        assert time.monotonic() < until_s and program.poll() is None
        time.sleep(0.05)
    os.kill(program.pid, number)
    program.communicate()
    while live_runs(Path("results")):
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert '"outcome":"interrupted"' in folder.events.read_text()


def test_a_program_that_does_not_wait_is_told_that_its_run_ends_too(tmp_path: Path) -> None:
    """Nothing was printed, and the run was interrupted."""
    script = SCRIPT.format(guard='if __name__ == "__main__":').removesuffix("    run.wait()\n")
    (tmp_path / "script.py").write_text(script)
    program = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True)
    assert program.stderr == (
        "bamboo: this program ends, and its run with it; wait() on what train() returns lets it finish\n"
    )


@pytest.mark.soak
def test_a_program_without_a_guard_is_told_so_by_its_worker(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(guard="if True:"))
    done = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and 'put the call below: if __name__ == "__main__":' in done.stderr


@pytest.mark.soak
def test_a_stopped_run_is_resumed_and_broken_code_is_told_with_its_line() -> None:
    import mine

    run = train(mine.small, stages=2, steps=100_000, lr_schedule="constant", in_process=True, quiet=True)
    next(each for each in run.events(follow=True) if isinstance(each, CommitRecord))
    steps = run.stop().steps
    again = train(resume=run, steps=steps + 2, in_process=True, quiet=True).wait()
    assert (again.outcome, again.plain["resumed_after"]) == ("finished", steps - 1)
    with pytest.raises(UserCodeError, match="no model today") as broken:
        train(mine.breaks, stages=2, in_process=True, quiet=True).wait()
    assert "mine.py:9, in breaks" in str(broken.value)
