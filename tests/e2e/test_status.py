"""`bamboo status` beside a running job: it reads the store until the run ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from bamboo_cli.status import Reader
from engine.core.protocol.run_status import RunStatus
from tests.e2e.launcher import Launcher

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

Launch = Callable[..., Launcher]

RUN = (
    *("run", "--model", "timed", "--stages", "2", "--microbatches", "2", "--steps", "5000", "--validate-every", "0"),
    "--no-check-pure",
)
SLOW = (*RUN, "--set", "model_args.forward_ms=20", "--set", "model_args.backward_ms=40")


def status(launcher: Launcher, *arguments: str) -> subprocess.Popen[str]:
    """Starts `bamboo status` in the folder of a launch."""
    command = [sys.executable, "-m", "bamboo_cli", "status", *arguments]
    return subprocess.Popen(
        command, cwd=launcher.folder, stdout=subprocess.PIPE, text=True, env={"PYTHONPATH": ":".join(sys.path)}
    )


def test_a_live_run_shows_its_step_its_workers_and_how_it_ends(launch: Launch) -> None:
    launcher = launch(*SLOW, "--injectable", "no")
    # The agent writes the workers' heartbeats to the store once a second.
    launcher.wait_until(lambda: len(launcher.events("commit")) >= 8)
    with status(launcher, "--watch", "--json") as watching, status(launcher) as once:
        text = once.communicate()[0].splitlines()
        assert watching.stdout is not None
        first = json.loads(watching.stdout.readline())
        refuse_faults(launcher)
        kill_and_look(launcher)
        launcher.process.terminate()
        launcher.wait()
        *_, last = (json.loads(line) for line in watching.stdout)
    pids = {name: pid for event in launcher.events("started") for name, pid in [(event["of"], event["child"])]}
    name = launcher.run_folder.resolve().name
    assert (first["run_id"], first["phase"], first["epoch"], first["live"]) == (name, "running", 1, True)
    assert 7 <= first["committed"] < first["num_steps"] == 5000
    assert {each["worker"]: each["pid"] for each in first["workers"]} == pids
    assert [each["now"] for each in first["workers"]] == [[[0, 0]], [[0, 1]]]
    assert all(0 <= each["heard_s_ago"] < 2 for each in first["workers"])
    assert first["verdicts"] == [[1, "every worker has joined"]]
    assert re.fullmatch(
        rf"{name}: running, epoch 1, step \d+ of 5000, loss \d\.\d+, takes no faults \(--injectable no\)", text[0]
    )
    assert not first["injectable"]
    assert not json.loads((launcher.run_folder / "run.json").read_text())["injectable"]
    assert text[1].split() == "worker state stages step last action silent s tensors MiB pid".split()
    assert re.fullmatch(rf" +0  at work  0 +\d+  \d\w+ +\d\.\d +\d+(\.\d+)? +{pids[0]}", text[2])
    commits = [event["step"] for event in launcher.events("commit")]
    assert (last["phase"], last["committed"], last["live"]) == ("interrupted", commits[-1], False)
    assert [each["state"] for each in last["workers"]] == ["finished", "dead"]
    assert launcher.leftovers() == []


def refuse_faults(launcher: Launcher) -> None:
    """Asserts that the launcher itself refuses faults, and that `bamboo inject` does not even ask it."""
    request = launcher.run_folder / "request-1.json"
    request.touch(mode=0o600)
    request.write_text(json.dumps([{"id": "a", "do": "kill", "parameters": {}, "moment": {}, "victims": []}]))
    launcher.wait_until(lambda: launcher.events("refused"))
    assert not request.exists()
    assert [event["reason"] for event in launcher.events("refused")] == ["the run was started with --injectable no"]
    command = [sys.executable, "-m", "bamboo_cli", "inject", "--scenario", "kill-middle-stage", "--run", "latest"]
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(command, cwd=launcher.folder, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 2
    assert f"--run: expected a run that takes faults, found {launcher.run_folder.resolve().name}" in done.stderr
    assert len(launcher.events("refused")) == 1


def kill_and_look(launcher: Launcher) -> None:
    """Kills a worker and asserts that every look names an owner of each stage, and soon the dead worker too.

    Before, its stage had no owner for up to a second, and the dead worker was shown only after the run.
    """
    reader = Reader(launcher.folder / "results", None, "", plain_http=False)
    reader.look()
    os.kill(launcher.events("started")[1]["child"], signal.SIGKILL)
    seen: list[RunStatus] = []
    while not seen or seen[-1].epoch < 2 or len(seen) < 8:
        found, is_live, _ = reader.look()
        assert is_live
        assert sorted(slot for each in found.workers for slot in each.now) == [(0, 0), (0, 1)]
        seen.append(found)
    assert [(each.state, each.now) for each in seen[-1].workers] == [("in", ((0, 0), (0, 1))), ("dead", ())]


def test_a_run_that_was_cut_off_is_not_taken_for_alive(launch: Launch) -> None:
    launcher = launch(*SLOW)
    launcher.wait_until(lambda: len(launcher.events("commit")) >= 2)
    launcher.process.kill()
    launcher.process.wait()
    assert launcher.leftovers() == []  # nor is the private etcd
    with status(launcher) as once:
        text = once.communicate()[0].splitlines()
    last = launcher.events("commit")[-1]["step"]
    assert once.returncode == 69
    assert f": launcher gone, epoch 1, step {last + 1} of 5000, loss " in text[0]
    assert [line.split()[1] for line in text[2:4]] == ["gone", "gone"]
