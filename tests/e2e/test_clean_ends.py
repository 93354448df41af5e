"""Each kind of end of a run: the right exit code, a message that names the culprit, and no leftovers."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from bamboo_cli.app import app
from engine.files.run_folder import RUN, own_files
from tests.e2e.launcher import Done, Launcher, Listener

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Launch = Callable[..., Launcher]

USER = "tests.e2e.user_models"
# Stages that sleep: a step takes some 40 ms, the run far longer than any test.
LONG = (
    *("run", "--model", "timed", "--stages", "3", "--microbatches", "4", "--steps", "5000"),
    *("--set", "model_args.forward_ms=2", "--set", "model_args.backward_ms=4", "--validate-every", "0"),
    "--no-check-pure",
)
ALONE = ("--set", "redundancy=none")  # no worker can take over


def run_user_model(launch: Launch, factory: str, *arguments: str) -> tuple[Launcher, Done]:
    """Runs a model of `user_models` over three stages, four microbatches a step, to its end."""
    launcher = launch(
        *("run", "--model", f"{USER}:{factory}", "--stages", "3", "--microbatches", "4", "--steps", "3"), *arguments
    )
    done = launcher.wait()
    assert launcher.leftovers() == []
    return launcher, done


def long_run(launch: Launch, *arguments: str) -> Launcher:
    """Starts a run that does not end by itself, and waits for its second commit."""
    launcher = launch(*LONG, *arguments)
    launcher.wait_until(lambda: len(launcher.events("commit")) >= 2)
    return launcher


def outcome(launcher: Launcher) -> dict[str, object]:
    result: dict[str, object] = json.loads((launcher.run_folder / "run.json").read_text())["result"]
    return result


def culprit(launcher: Launcher, worker: int) -> str:
    """Returns how a message names a worker, with the pid that the events know."""
    *_, pid = (event["child"] for event in launcher.events("started") if event["of"] == worker)
    return f"worker {worker} (pid {pid})"


def test_a_run_leaves_nothing_and_listens_nowhere(launch: Launch) -> None:
    launcher = launch("run", "--stages", "3", "--steps", "6", "--validate-every", "0")
    seen: set[Listener] = set()
    names: set[str] = set()
    while launcher.process.poll() is None:
        seen |= launcher.listeners()
        names |= launcher.processes().keys()
        time.sleep(0.1)  # a look costs more than a step
    assert launcher.wait().code == 0
    assert launcher.leftovers() == []
    assert {"launcher", "bamboo-fork", "bamboo-0", "bamboo-1", "bamboo-2"} <= names
    assert sum(name.startswith("etcd-") for name in names) == 1
    assert seen == set(), "links of one host have no port"
    assert launcher.listeners() == set()
    assert sorted(each.name for each in launcher.folder.iterdir()) == ["results", "stderr", "stdout", "tmp"]
    run = launcher.run_folder.resolve()
    assert set(run.rglob("*")) == set(own_files(run, RUN))  # `bamboo clean` knows every file of a run


def test_an_exception_in_a_layer_ends_the_run_with_its_traceback(launch: Launch) -> None:
    launcher, done = run_user_model(launch, "raises_in_forward", *ALONE)
    assert done.code == 3
    assert f"{culprit(launcher, 1)} raised" in done.stderr
    assert "user_models.py" in done.stderr
    assert "RuntimeError: planted in a forward" in done.stderr
    assert "last committed step 0" in done.stdout
    assert outcome(launcher)["outcome"] == "failed"


def test_an_exception_that_is_survived_is_told_at_once_and_kept(launch: Launch) -> None:
    """It was survived without a word: an empty log, no line in a report, and "exited with code 3" as the verdict.

    The log has it in one line of JSON, with its place; the records of the workers have theirs too.
    """
    launcher, done = run_user_model(launch, "raises_once", "--tee", "--log-format", "json")
    assert done.code == 0
    words = "raised RuntimeError: my own bug: cache is corrupt, in layer 1 (middle)"
    line = r"\(\S+/user_models.py:\d+, in _raise_in_worker_1\)"
    log = launcher.run_folder.resolve() / "logs" / "worker-1.log"
    told = (
        rf"worker 1 {re.escape(words)} of step 1, microbatch \d of pipeline 0 {line}; full text in "
        rf"\S+{log.parent.parent.name}/logs/worker-1.log\n"
    )
    assert re.search(rf"{told}  \S+/user_models.py:\d+, in _raise_in_worker_1\n      raise RuntimeError", done.stderr)
    assert re.search(r"\n  \.\.\. \d+ frames of bamboo and torch\n", done.stderr)
    assert f"worker 1 {words}, " in done.stdout  # the line of the recovery
    assert "[1] about to raise\n" in done.stderr
    assert "[1] RuntimeError: my own bug: cache is corrupt\n" in done.stderr
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    places = [{name: each[name] for name in ("worker", "stage", "step", "level")} for each in lines]
    (traceback,) = (each for each in lines if each["message"].startswith("Traceback"))
    assert places[lines.index(traceback)] == {"worker": 1, "stage": 1, "step": 1, "level": "error"}
    assert "RuntimeError: my own bug: cache is corrupt" in traceback["message"]
    assert {"worker": 1, "stage": 1, "step": 1, "level": "info"} in places  # it was about to raise
    marks = launcher.events("mark")
    assert {each["host"] for each in marks} == {traceback["host"]}
    assert {each["stage"] for each in marks} <= {0, 1, 2}
    (record,) = launcher.events("raised")
    assert (record["of"], record["step"], record["place"]) == (1, 1, "layer 1 (middle)")
    assert record["traceback"].rstrip().endswith("in layer 1 (middle)\nin microbatch 0 of pipeline 0")
    (verdict,) = (event["verdict"] for event in launcher.events("epoch") if event["verdict"])
    assert verdict[0][1].startswith(words)
    assert verdict[0][2] == "raised"


def test_a_wrong_loss_is_found_before_training(launch: Launch) -> None:
    """It ended step 0 with exit code 3, torch's words without a place, and talk of a takeover."""
    launcher, done = run_user_model(launch, "wrong_loss")
    assert done.code == 2
    assert "in the loss: TypeError: cross_entropy_loss()" in done.stderr
    assert "outputs float32 [4, 1], targets float32 [4, 1]; both are tuples" in done.stderr
    assert "take over" not in done.stdout + done.stderr
    assert launcher.events("go") == []
    assert {(event["place"], event["step"]) for event in launcher.events("raised")} == {("the loss", -1)}


@pytest.mark.parametrize(("index", "code"), [pytest.param(0, 2, marks=pytest.mark.soak), (1, 0)])
def test_an_exception_in_a_validation_is_found_early_or_costs_the_validation_only(
    launch: Launch, index: int, code: int
) -> None:
    """A run that had committed every step failed with 3, after all of its training."""
    launcher = launch(
        *("run", "--model", "tests.e2e.user_batches:flat", "--data", "tests.e2e.user_batches:RaisesInValidation"),
        *("--set", f"data_args.index={index}", "--set", "validation_microbatches=2"),
        *("--stages", "2", "--steps", "3", "--microbatches", "4"),
    )
    done = launcher.wait()
    assert done.code == code
    assert len(launcher.events("commit")) == (3 if code == 0 else 0)
    assert {(event["place"], event["step"]) for event in launcher.events("raised")} == {
        ("the data", 2 if code == 0 else -1)
    }
    assert re.search(r"KeyError: 'row 77'.* \(\S+/user_batches.py:\d+, in validation\)", done.stderr)
    assert ("missing: the validation after step 2" in done.stdout) == (code == 0)


def test_an_exception_in_a_constructor_is_the_users_mistake(launch: Launch) -> None:
    _, done = run_user_model(launch, "raises_when_built", *ALONE)
    assert done.code == 2
    assert "in the constructor of layer 1 (middle): RuntimeError: planted in a constructor" in done.stderr


def test_a_factory_that_raises_is_the_users_mistake(launch: Launch) -> None:
    _, done = run_user_model(launch, "raises")
    assert done.code == 2
    words = rf"in the factory {USER}:raises: RuntimeError: planted in a factory \(\S+/user_models.py:\d+, in raises\)"
    assert re.search(words, done.stderr)
    assert "Traceback" not in done.stderr
    assert "was to take over" not in done.stdout


@pytest.mark.parametrize("stages", ["3", pytest.param("1", marks=pytest.mark.soak)])
def test_another_shape_names_the_layer_and_both_shapes(launch: Launch, stages: str) -> None:
    _, done = run_user_model(launch, "another_shape", "--stages", stages)
    assert done.code == 2  # every heir raises it in step 0: no training is lost
    words = r"raised TypeError: layer 1 \(middle\): .*, in step 0, microbatch \d of pipeline 0 "
    words += r"\(\S+/user_models.py:\d+, in forward\); full text in"
    assert re.search(words, done.stderr)
    assert "took over" not in done.stdout
    assert "[4, 31]" in done.stderr
    assert "[4, 32]" in done.stderr


def test_a_loss_that_is_not_a_number_ends_the_run_with_a_code_of_its_own(launch: Launch) -> None:
    launcher, done = run_user_model(launch, "not_a_number", "--json")
    said = json.loads(done.stdout)
    assert (done.code, said["exit_code"], said["outcome"], said["steps"]) == (7, 7, "failed", 1)
    assert "the loss is nan" in said["error"]
    assert f"{culprit(launcher, 2)}: the loss is nan at step 1, pipeline 0, microbatch 0" in done.stderr


def test_a_gradient_that_is_not_finite_ends_the_run_with_a_code_of_its_own_and_names_the_layer(launch: Launch) -> None:
    _, done = run_user_model(launch, "infinite_gradient")
    assert done.code == 7
    text = r"the gradient norm is (inf|nan) at step 1; a lower lr often helps; "
    text += r"the backward met it first in layer \d \(\w+\)"
    assert re.search(text, done.stderr)
    assert "last committed step 0" in done.stdout


@pytest.mark.parametrize(
    ("factory", "num_commits", "num_deaths", "code"),
    [pytest.param("dies_when_built", 0, 4, 3, marks=pytest.mark.soak), ("dies_in_step", 1, 1, 80)],
)
def test_a_worker_that_is_killed_is_named_with_its_signal(
    launch: Launch, factory: str, num_commits: int, num_deaths: int, code: int
) -> None:
    launcher, done = run_user_model(launch, factory, *ALONE)
    assert done.code == code
    assert "worker 1 was killed (SIGKILL)" in done.stderr
    assert f"{culprit(launcher, 1)} wrote " in done.stderr
    assert len(launcher.events("commit")) == num_commits
    assert [event["of"] for event in launcher.events("exit") if not event["expected"]] == [1] * num_deaths


@pytest.mark.soak
def test_a_worker_killed_from_outside_is_named(launch: Launch) -> None:
    launcher = long_run(launch, *ALONE)
    os.kill(launcher.processes()["bamboo-2"], signal.SIGKILL)
    done = launcher.wait()
    assert launcher.leftovers() == []
    assert done.code == 80
    assert "the state of stage 2 is lost in epoch 2; last committed step" in done.stderr
    assert "worker 2 was killed (SIGKILL)" in done.stderr
    assert f"{culprit(launcher, 2)} wrote " in done.stderr


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.soak)]
)
def test_a_signal_lets_the_step_end_and_the_printed_command_goes_on(
    launch: Launch, number: signal.Signals, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = long_run(launch, "--lr-schedule", "constant")
    if number is signal.SIGINT:
        os.killpg(launcher.process.pid, number)  # as a terminal does: to the whole foreground group
    else:
        launcher.process.send_signal(number)
    done = launcher.wait()
    assert launcher.leftovers() == []
    assert done.code == code
    commits = launcher.events("commit")
    last = commits[-1]["step"]
    assert [event["step"] for event in commits if event["last"]] == [last]
    assert f"last committed step {last}" in done.stdout
    assert outcome(launcher)["outcome"] == "interrupted"
    rows = (launcher.run_folder / "trajectory.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == [step for step in range(last + 1) for _ in range(4)]
    (command,) = re.findall(r"next: (bamboo run --resume \S+)", done.stderr)
    monkeypatch.chdir(launcher.folder)
    shorter = ("--steps", str(last + 3), "--in-process", "--json")
    resumed = CliRunner().invoke(app, [*shlex.split(command)[1:], *shorter], catch_exceptions=False)
    summary = json.loads(resumed.stdout)
    assert (summary["outcome"], summary["steps"], summary["resumed_after"]) == ("finished", last + 3, last)
    assert summary["next"] is None


def test_json_has_the_command_that_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = "--model mlp --stages 2 --microbatches 2 --steps 4 --checkpoint-every 1 --in-process"
    lost = f"{small} --redundancy none --restarts 0 --kill 3:1 --no-twin --json"
    stopped = json.loads(CliRunner().invoke(app, ["run", *lost.split()]).stdout)
    assert stopped["exit_code"] == 75
    assert stopped["next"] == f"bamboo run --resume {stopped['run_dir']}"
    resumed = CliRunner().invoke(app, [*shlex.split(stopped["next"])[1:], "--in-process", "--redundancy", "eager"])
    assert resumed.exit_code == 0
    assert "--kill" not in resumed.stderr  # its step was maybe before the first


def test_ctrl_c_before_the_first_step_ends_the_run_at_once(launch: Launch) -> None:
    launcher = launch(*LONG)
    launcher.wait_until(lambda: launcher.events("job"))
    os.killpg(launcher.process.pid, signal.SIGINT)
    done = launcher.wait()
    assert launcher.leftovers() == []
    assert done.code == 130
    assert launcher.events("commit") == []


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.soak), signal.SIGHUP])
def test_a_layer_that_hangs_does_not_keep_an_interrupted_run(launch: Launch, number: signal.Signals) -> None:
    """One Ctrl-C took 13.6 s; a run that was interrupted late went on to judge its state as lost."""
    launcher = launch(*LONG, "--set", "model_args.backward_ms=60000")
    launcher.wait_until(lambda: any(event["step"] == 0 for event in launcher.events("action")))
    since_s = time.monotonic()
    launcher.process.send_signal(number)
    launcher.wait_until(lambda: "stopping; Ctrl-C again kills" in (launcher.folder / "stderr").read_text(), timeout_s=5)
    done = launcher.wait(timeout_s=30)
    # Two seconds on an idle machine, which `make soak-interrupts` holds; the deadline of before was ten.
    assert time.monotonic() - since_s < 8
    assert launcher.leftovers() == []
    assert done.code == 128 + number
    assert "interrupted: 0 steps" in done.stdout
    assert launcher.events("commit") == []
    assert {event["why"] for event in launcher.events("killed")} == {"the run was interrupted"}
    assert (launcher.events("ended")[-1]["outcome"], launcher.events("failed")) == ("interrupted", [])


@pytest.mark.parametrize(
    "moment",
    [*(pytest.param(moment, marks=pytest.mark.soak) for moment in ("started", "job", "partition", "go")), "commit"],
)
def test_sigkill_of_the_launcher_takes_everything_with_it(launch: Launch, moment: str) -> None:
    launcher = launch(*LONG)
    launcher.wait_until(lambda: launcher.events(moment))
    launcher.process.kill()
    launcher.process.wait()
    assert launcher.leftovers() == []


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--backend", "nccl"), 4, "backend nccl sends between GPUs, and the workers compute on the CPU"),
        pytest.param(("--stages", "0"), 2, r"stages: expected a whole number >= 1, found 0", marks=pytest.mark.soak),
        (("--results", "/proc/none"), 74, r"results folder '/proc/none' cannot be used"),
        (("--set", "optimizer_args.epz=1"), 2, r"optimizer_args.epz: expected one of .* \(did you mean 'eps'\?\)"),
    ],
)
def test_what_cannot_be_run_says_why(launch: Launch, arguments: tuple[str, ...], code: int, message: str) -> None:
    launcher = launch("run", *arguments)
    done = launcher.wait()
    assert launcher.leftovers() == []
    assert done.code == code
    assert re.search(message, done.stderr)
    assert "Traceback" not in done.stderr
