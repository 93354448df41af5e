"""However a run ends, the workers that are left keep its last committed step: it goes on with the same bits."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from engine.core.errors import ExitCode
from engine.files.checkpoint_folder import checkpoints_at
from tests.e2e.conftest import Launch
from tests.e2e.kept_models import BROKEN, SLEEP_S
from tests.e2e.test_resumed_run import rows_of

_MODELS = "tests.e2e.kept_models"
_SHAPE = ("--stages", "3", "--steps", "9", "--microbatches", "4", "--microbatch-size", "4", "--validate-every", "0")


def line(model: str, results: Path, *more: str) -> tuple[str, ...]:
    """Returns the line that is right the first time and every other."""
    own = ("--model", f"{_MODELS}:{model}", "--data", f"{_MODELS}:samples", "--no-check-pure", "--trust-code")
    return ("run", *own, *_SHAPE, "--results", str(results), "--resume", "auto", "--json", *more)


def kept_steps(results: Path) -> list[int]:
    """Returns the steps whose checkpoints are good, of the newest run."""
    folder = checkpoints_at((results / "latest").resolve() / "checkpoints")
    return [folder.verify(name).step for name in folder.names()]


@pytest.mark.parametrize(
    ("model", "redundancy"), [("normed", "lazy"), pytest.param("plain", "none", marks=pytest.mark.soak)]
)
def test_an_exception_of_the_user_costs_the_open_step_only(
    launch: Launch, tmp_path: Path, model: str, redundancy: str
) -> None:
    """All steps since the last checkpoint were lost: two workers had raised the same, and the others had the state."""
    results, more = tmp_path / "runs", ("--redundancy", redundancy)
    ended = launch(*line(model, results, *more), **{BROKEN: "77"}).wait()
    assert ended.code == ExitCode.NOT_RECOVERED, ended.stderr
    failed = json.loads(ended.stdout)
    assert (kept_steps(results), failed["kept"], failed["steps"]) == ([1], 1, 2)
    assert failed["next"].startswith("bamboo run --resume ")
    told = [each for each in ended.stderr.splitlines() if "sample 77 is broken" in each and "raise " not in each]
    if redundancy == "lazy":  # once when it is raised, and once by the end of the run
        assert len(told) == 2 and "raised the same in step 2: it is the data, not a worker" in told[1]
    first = rows_of(Path(failed["run_dir"]))
    resumed = launch(*line(model, results, *more)).wait()
    assert resumed.code == ExitCode.OK, resumed.stderr
    assert json.loads(resumed.stdout)["resumed_after"] == 1
    second = rows_of(Path(json.loads(resumed.stdout)["run_dir"]))
    whole = launch(*line(model, tmp_path / "whole", *more)).wait()
    assert first | second == rows_of(Path(json.loads(whole.stdout)["run_dir"]))
    assert not first.keys() & second.keys()


def test_buffers_that_the_open_step_has_changed_are_not_kept_as_those_of_the_last_one(
    launch: Launch, tmp_path: Path
) -> None:
    results = tmp_path / "runs"
    ended = launch(*line("normed", results, "--redundancy", "none"), **{BROKEN: "77"}).wait()
    assert ended.code == ExitCode.NOT_RECOVERED, ended.stderr
    assert (kept_steps(results), json.loads(ended.stdout)["kept"]) == ([], None)
    assert "the open step has changed buffers, and without redundancy no copy of them is kept" in ended.stderr


def test_a_loss_that_is_not_finite_costs_no_committed_step(launch: Launch, tmp_path: Path) -> None:
    wild = ("--lr", "1e25", "--lr-schedule", "constant", "--warmup-steps", "0", "--optimizer", "sgd")
    ended = launch(*line("plain", tmp_path / "runs", *wild, "--clip-norm", "0")).wait()
    assert ended.code == ExitCode.NOT_FINITE, ended.stderr
    failed = json.loads(ended.stdout)
    assert kept_steps(tmp_path / "runs") == [failed["steps"] - 1]
    assert failed["next"].endswith(" --other-bits --lr 5e+24")  # the same rate would give the same loss


def test_a_signal_in_a_step_that_takes_longer_than_its_sender_waits_keeps_the_last_one(
    launch: Launch, tmp_path: Path
) -> None:
    """The open step had a second; then the workers were killed, and the state of a day with them."""
    results = tmp_path / "runs"
    launched = launch(*line("normed", results, "--load-ahead", "0"), **{SLEEP_S: "0.15"})
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and not list(results.glob("2*/events.jsonl")):
        time.sleep(0.05)
    (events,) = results.glob("2*/events.jsonl")
    while time.monotonic() < until_s and b'{"event":"commit"' not in events.read_bytes():
        time.sleep(0.02)
    time.sleep(0.2)
    launched.interrupt(signal.SIGTERM)
    ended = launched.wait()
    assert ended.code == 128 + signal.SIGTERM, ended.stderr
    assert kept_steps(results) == [json.loads(ended.stdout)["steps"] - 1]
