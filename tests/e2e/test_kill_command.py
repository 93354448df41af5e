"""`bamboo run --kill` as its users see it: the lines about a recovery, the comparison, and the exit codes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from engine.files.trajectory_file import keep_twin, kept_twin
from tests.e2e.launcher import Launcher, on_a_terminal

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

Launch = Callable[..., Launcher]

SMALL = (
    *("run", "--model", "mlp", "--stages", "3", "--microbatches", "4", "--steps", "6", "--validate-every", "0"),
    "--no-check-pure",
)
# Stages that sleep: the run lasts for seconds and computes little.
TIMED = ("--model", "timed", "--set", "model_args.forward_ms=10", "--steps", "14")


def test_a_kill_is_recovered_from_and_the_weights_are_compared(launch: Launch) -> None:
    """A twin is run once, and a difference to it fails the run."""
    launcher = launch(*SMALL, "--kill", "2:1", "--json")
    done = launcher.wait()
    assert "running the fault-free twin" in done.stderr
    said = json.loads(done.stdout)
    assert (done.code, said["exit_code"], said["outcome"], said["steps"]) == (0, 0, "finished", 6)
    assert said["faults"] == [{"fault": "2:1", "fired": True}]
    assert said["twin"] == {"steps_compared": 6, "difference": None}
    (recovery,) = said["recoveries"]
    assert (recovery["culprits"], recovery["step"], recovery["lost_steps"]) == ([1], 2, 0)
    assert [each["slot"] for each in recovery["heirs"]] == [[0, 1]]
    assert recovery["heirs"][0]["from"] == 1
    assert recovery["phases_ms"].keys() == {"detect", "agree", "fence", "regroup", "inventory", "plan", "replay"}
    assert sum(recovery["phases_ms"].values()) == pytest.approx(recovery["pause_ms"], abs=0.01)
    (line,) = [line for line in done.stderr.splitlines() if line.endswith("weights identical")]
    assert line.startswith("worker 1 was killed (SIGKILL) in step 2 after ")
    assert ", 0 steps lost, weights identical" in line
    facts = json.loads((launcher.run_folder / "run.json").read_text())
    assert facts["result"] | {"next": None, "blocks": 1, "why_blocks": None} == said
    assert launcher.leftovers() == []
    a_difference_fails(launch, launcher.folder / "results")


def a_difference_fails(launch: Launch, results: Path) -> None:
    """Runs the job with another kill and policy, of the same twin; then again, with a twin that differs in one hash."""
    again = (*SMALL, "--results", str(results))
    second = launch(*again, "--kill", "3:2:F:0", "--redundancy", "eager").wait()
    assert (second.code, "running the fault-free twin" in second.stderr) == (0, False)
    (kept,) = (results / "twins").iterdir()
    rows = kept_twin(results, kept.stem)
    assert rows is not None
    step, layer = rows[-1].step, rows[-1].layer
    keep_twin(results, kept.stem, [*rows[:-1], replace(rows[-1], state=rows[-1].state[::-1])])
    third = launch(*again, "--kill", "2:1", "--json").wait()
    said = json.loads(third.stdout)
    assert (third.code, said["exit_code"], said["outcome"]) == (1, 1, "failed")
    assert (
        f"the weights are not those of the fault-free twin: step {step}, layer {layer}: different weights or "
        "optimizer state" in said["error"]
    )
    assert "weights identical" not in third.stderr


def test_without_a_twin_nothing_is_said_of_the_weights(launch: Launch) -> None:
    launcher = launch(*SMALL, "--kill", "2:1:STEP:after", "--no-twin")
    done = launcher.wait()
    assert done.code == 0
    recovered, summary, _ = done.stdout.splitlines()
    assert recovered.endswith("s, 0 steps lost")
    assert summary.startswith("finished: 6 steps in ")
    assert not (launcher.run_folder / "twin").exists()
    assert not (launcher.run_folder.parent / "twins").exists()


def test_a_fault_that_does_not_strike_is_an_invalid_case(launch: Launch) -> None:
    # All shadows are restored in the step after the failure.
    done = launch(*SMALL, "--kill", "2:1", "--kill", "5:1:HEAL", "--no-twin", "--json").wait()
    said = json.loads(done.stdout)
    assert (done.code, said["exit_code"], said["outcome"]) == (6, 6, "invalid")
    assert said["error"].endswith("nothing was proved: 5:1:HEAL did not strike (kill before 1HEAL of step 5)")
    assert said["faults"] == [{"fault": "2:1", "fired": True}, {"fault": "5:1:HEAL", "fired": False}]


def test_mistakes_are_named_before_anything_is_started(launch: Launch) -> None:
    launcher = launch(*SMALL, "--kill", "9:1", "--kill", "2:7", "--json")
    done = launcher.wait()
    assert (done.code, json.loads(done.stdout)["outcome"]) == (2, "refused")
    assert done.stderr.count("bamboo: --kill ") == done.stderr.count(": expected a s") == 2
    assert not (launcher.folder / "results").exists()


def test_a_lost_stage_ends_with_one_screen(launch: Launch) -> None:
    done = launch(*SMALL, "--redundancy", "none", "--kill", "2:1").wait()
    assert done.code == 80
    assert "the state of stage 1 is lost" in done.stderr
    assert "\n  died   worker 1 (stage 1): its last action was " in done.stderr
    assert "\n  done   steps 0 to 1 were committed, but no checkpoint was written\n" in done.stderr
    assert "--redundancy lazy or --pipelines 2" in done.stderr
    assert "Traceback" not in done.stderr


def test_on_a_terminal_there_is_a_table_whose_dead_are_red_and_their_heirs_named(tmp_path: Path) -> None:
    text = on_a_terminal(tmp_path, *SMALL, *TIMED, "--kill", "4:1", "--no-twin")
    assert re.search(r"\x1b\[1;31m1 \(now worker [02]\)", text)
    assert re.search(r"\x1b\[1;31mdead", text)
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"worker +pid +stages +state +step +action +microbatches/s", plain)
    assert re.search(r"\n +1 +\d+ +1 +running +\d+ +(waits in )?\d[A-Z_]+\d* +[\d.]+\r", plain)
    assert re.search(r"took over\s+stage\s+1;\s+training\s+stalled\s+for\s+[\d.]+\s+m?s,\s+0\s+steps\s+lost", plain)
    assert re.search(r"\n +0 +\d+ +0( 1)? +running", plain)
