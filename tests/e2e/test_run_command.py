"""`bamboo run` as its users and their scripts see it: stdout, stderr, files, precedence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.core.checks.trajectory import trajectory_hash
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from engine.files.trajectory_file import trajectory_rows
from tests.e2e.launcher import ROOT, Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Launch = Callable[..., Launcher]

SMALL = ("run", "--model", "mlp", "--stages", "2", "--microbatches", "3", "--steps", "4", "--validate-every", "2")
# Loaded by Python first: it refuses new processes, and imports of torch and pandas.
TRIPWIRE = """
import sys

def wire(event, arguments):
    started = event in ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system")
    if started or (event == "import" and arguments[0] in ("torch", "pandas")):
        print("tripwire", event, *arguments[:1], file=sys.stderr)
        raise SystemExit(99)

sys.addaudithook(wire)
"""


@pytest.fixture(name="wired")
def _wired(tmp_path: Path) -> dict[str, str]:
    """Returns an environment that refuses new processes, and imports of torch and pandas."""
    (tmp_path / "wire").mkdir()
    (tmp_path / "wire" / "sitecustomize.py").write_text(TRIPWIRE)
    return {"PYTHONPATH": f"{tmp_path / 'wire'}{os.pathsep}{ROOT}"}


def test_json_is_one_object_on_stdout_and_the_files_say_the_same(launch: Launch) -> None:
    """The events tell what each worker did in the order of its program."""
    launcher = launch(*SMALL, "--json")
    done = launcher.wait()
    assert done.code == 0
    assert done.stdout.count("\n") == 1
    said = json.loads(done.stdout)
    folder = launcher.folder / said["run_dir"]
    rows = trajectory_rows((folder / "trajectory.csv").read_text(), Path("trajectory.csv"))
    assert len(rows) == 4 * 4  # steps, layers
    assert said["outcome"] == "finished"
    assert (said["exit_code"], said["steps"], said["recoveries"]) == (0, 4, [])
    assert said["loss_first"] == rows[0].loss
    assert said["loss_last"] == rows[-1].loss
    assert said["trajectory"] == trajectory_hash(rows)
    assert 0 < said["launch_s"] < said["wall_s"] < 60
    assert said["peak_stash"] == {"0": 2, "1": 1}
    assert all(peak > 1 for peak in said["peak_memory_mib"].values())
    also = {"next": None, "blocks": 1, "why_blocks": None}
    assert json.loads((folder / "run.json").read_text())["result"] | also == said
    assert "\x1b" not in done.stderr
    assert re.search(r"^(starting: \d of 2 workers ready|step )", done.stderr, re.MULTILINE)
    assert "finished: 4 steps" in done.stderr
    again = launch("run", str(folder / "run.json"), "--json", BAMBOO_STEPS="9").wait()
    assert json.loads(again.stdout)["trajectory"] == said["trajectory"]
    did_as_programmed(launcher)


def did_as_programmed(launcher: Launcher) -> None:
    program, _ = initial_program(Job(stages=2, microbatches=3))
    actions = launcher.events("action")
    for worker in (0, 1):
        mine = [event for event in actions if event["worker"] == worker]
        expected = [(step, str(action)) for step in range(4) for action in program[worker]]
        assert [(event["step"], event["action"]) for event in mine] == expected
        times = [at for event in mine for at in (event["start_ns"], event["end_ns"])]
        assert times == sorted(times)
        assert len({event["pid"] for event in mine}) == 1
    assert [event["step"] for event in launcher.events("commit")] == [0, 1, 2, 3]
    assert [event["step"] for event in launcher.events("validation")] == [1, 3]


def test_the_run_folder_holds_what_it_takes_to_repeat_the_run(launch: Launch) -> None:
    """Without --json the last lines are the summary and the folder."""
    launcher = launch(*SMALL, "--seed", "7", "--name", "small", "--results", "elsewhere/runs")
    done = launcher.wait()
    summary, told = done.stdout.splitlines()
    assert summary.startswith("finished: 4 steps in ")
    assert "\x1b" not in done.stdout + done.stderr
    latest = launcher.folder / "elsewhere" / "runs" / "latest"
    folder = latest.resolve()
    assert (done.code, launcher.folder / told) == (0, folder)
    assert re.fullmatch(r"\d{8}-\d{6}-small-[0-9a-f]{4}", folder.name)
    assert latest.readlink() == Path(folder.name)
    assert folder.stat().st_mode & 0o777 == 0o700
    files = ["checkpoints", "events.jsonl", "logs", "run.json", "steps", "trajectory.csv"]
    assert sorted(each.name for each in folder.iterdir()) == files
    assert {"worker-0.log", "worker-1.log"} <= {each.name for each in (folder / "logs").iterdir()}
    facts = json.loads((folder / "run.json").read_text())
    assert (facts["job"]["seed"], facts["job"]["threads"], facts["job"]["model"]) == (7, 1, "mlp")
    assert facts["origins"]["seed"] == "--seed"
    assert {"git_commit", "isa", "torch", "python"} <= facts["host"].keys()


def test_the_blocks_that_auto_chooses_are_told_first_kept_and_handed_over(launch: Launch) -> None:
    """With two blocks per stage both neighbours of a dead worker get one; the weights are those of the twin."""
    words = ("--model", "mlp", "--set", "model_args.depth=10", "--stages", "3", "--steps", "6", "--blocks", "auto")
    launcher = launch("run", *words, "--validate-every", "0", "--kill", "3:2", "--no-elastic", "--json")
    done = launcher.wait()
    assert done.code == 0, done.stderr
    said, why = (
        json.loads(done.stdout),
        "a step after a death takes 51 forwards of a stage with 1 block per stage and 40.5 with 2",
    )
    assert (said["blocks"], said["why_blocks"]) == (2, why)
    assert done.stderr.splitlines()[0] == f"blocks: 2 per stage, because {why}"
    facts = json.loads((launcher.folder / said["run_dir"] / "run.json").read_text())
    assert (facts["job"]["blocks"], facts["origins"]["blocks"]) == (2, f"--blocks (auto: {why})")
    assert [event["owners"] for event in launcher.events("epoch")][-1] == [0, 0, 0, 2, 2, 2]
    assert said["twin"] == {"steps_compared": 6, "difference": None}


def test_a_refused_job_is_one_object_too(launch: Launch) -> None:
    launcher = launch("run", "--stages", "0", "--json")
    done = launcher.wait()
    said = json.loads(done.stdout)
    assert (done.code, said["exit_code"], said["outcome"], said["run_dir"]) == (2, 2, "refused", None)
    assert "stages" in said["error"]
    assert not (launcher.folder / "results").exists()


def test_a_job_file_is_run_and_its_mistakes_are_all_named_at_their_place(launch: Launch, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("model: mlp\nstages: 2\nsteps: 2\nmodel_args:\n  width: 16\n")
    bad.write_text("model: mlp\nstags: 2\nsteps: many\n")
    done = launch("run", str(good), "--json").wait()
    assert (done.code, json.loads(done.stdout)["steps"]) == (0, 2)
    done = launch("run", str(bad)).wait()
    assert done.code == 2
    assert re.search(r"bad\.yaml:2:1: .*stags.*did you mean 'stages'", done.stderr)
    assert re.search(r"bad\.yaml:3:8: steps", done.stderr)


def test_each_layer_of_settings_beats_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds one layer at a time; `--explain` names the newest as the origin."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    job = tmp_path / "job.yaml"
    job.write_text("steps: 3\n")
    layers: list[tuple[str, tuple[str, ...], dict[str, str]]] = [
        ("default", (), {}),
        ("bamboo/job.yaml:1:8", (), {"XDG_CONFIG_HOME": str(tmp_path)}),
        ("job.yaml:1:8", (str(job),), {}),
        ("BAMBOO_STEPS", (), {"BAMBOO_STEPS": "4"}),
        ("--set", ("--set", "steps=5"), {}),
        ("--steps", ("--steps", "6"), {}),
    ]
    (tmp_path / "bamboo").mkdir()
    (tmp_path / "bamboo" / "job.yaml").write_text("steps: 2\n")
    arguments: tuple[str, ...] = ()
    for number, (origin, more_arguments, more_environment) in enumerate(layers, start=1):
        arguments += more_arguments
        for name, value in more_environment.items():
            monkeypatch.setenv(name, value)
        done = CliRunner().invoke(app, ["run", "--explain", "--json", *arguments], catch_exceptions=False)
        said: dict[str, Any] = json.loads(done.stdout)["steps"]
        assert said["value"] == (80 if number == 1 else number)
        assert said["origin"].endswith(origin)


@pytest.mark.parametrize("arguments", [("--dry-run",), ("--dry-run", "--json"), ("--explain",)])
def test_plans_start_no_process_and_load_neither_torch_nor_pandas(
    launch: Launch, wired: dict[str, str], arguments: tuple[str, ...]
) -> None:
    launcher = launch("run", "--stages", "3", "--microbatches", "4", *arguments, **wired)
    done = launcher.wait()
    assert (done.code, done.stderr) == (0, "")
    assert not (launcher.folder / "results").exists()
    if arguments == ("--dry-run",):
        assert "bubble 33.3%" in done.stdout  # (P - 1) / (M + P - 1)
        assert "worker 0: 3, worker 1: 2, worker 2: 1" in done.stdout
    if "--json" in arguments:
        plan = json.loads(done.stdout)
        assert plan["peak_stash"] == {"0": 3, "1": 2, "2": 1}
        assert plan["actions"]["2"][:3] == ["2RECV_F0", "2F0", "2B0"]


def test_the_wire_trips_when_a_run_starts_its_workers(launch: Launch, wired: dict[str, str]) -> None:
    done = launch(*SMALL, **wired).wait()
    assert done.code == 99
    assert "tripwire" in done.stderr


def test_a_mistake_that_a_worker_finds_is_told_with_its_place(launch: Launch, tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("model: mlp\npartition: type:conv\n")
    launcher = launch("run", str(job))
    done = launcher.wait()
    assert (launcher.leftovers(), done.code) == ([], 2)
    assert f"bamboo: {job}:2:12: partition: expected a pattern that matches a layer's class (" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("redirection", [pytest.param("2>&-", marks=pytest.mark.soak), ">&- 2>&- <&-"])
def test_closed_streams_do_not_disturb_a_run(redirection: str, tmp_path: Path) -> None:
    """A full one is in tests/cli/test_app.py."""
    command = f"exec {sys.executable} -m bamboo_cli {' '.join(SMALL)} --json {redirection}"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(["/bin/sh", "-c", command], cwd=tmp_path, env=environment, check=False, timeout=40)
    assert done.returncode == 0
    assert json.loads((tmp_path / "results/latest/run.json").read_text())["result"]["outcome"] == "finished"


def test_the_version_is_told(launch: Launch) -> None:
    done = launch("--version").wait()
    assert (done.code, re.fullmatch(r"\d+\.\d+\.\d+\n", done.stdout) is not None) == (0, True)
