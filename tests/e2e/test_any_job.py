"""`bamboo inject SCENARIO -- COMMAND`: jobs of other launchers are struck from outside, and nothing beside them is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from engine.external.progress import ReportedSteps
from tests.e2e.conftest import Launch
from tests.e2e.launcher import ROOT

TOY = (sys.executable, str(ROOT / "tests/e2e/toy_launcher.py"))
HEAD = "version: 1\nname: toy\nabout: a test\nlauncher: torchrun\nsteps: 60\n"


def events_in(run: Path, kind: str) -> list[dict[str, Any]]:
    """Returns the events of a run of one kind."""
    lines = (run / "events.jsonl").read_text().splitlines()
    return [event for line in lines if (event := json.loads(line))["event"] == kind]


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(("tests/e2e/elastic_job.py", "{folder}", "40"), id="quick"),
        pytest.param(("docs/examples/any_job.py", "{folder}", "--steps", "40"), id="example", marks=pytest.mark.soak),
    ],
)
def test_torchrun_restarts_a_killed_rank_and_no_other_job_is_struck(launch: Launch, job: tuple[str, ...]) -> None:
    """The job beside has the same rank in its environment. The weights are those of the run without the kill."""
    elastic = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*elastic, "--max-restarts", "1", str(ROOT / job[0]), *job[1:]]
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, env={**os.environ, "RANK": "1"}) as beside:
        # Else torchrun restarts the ranks with the store of the dead ones, where gloo may read an old address.
        own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        launched = launch("inject", "external/kill-rank", "--json", "--", *command, **own_store)
        done = launched.wait()
        assert beside.poll() is None
        beside.kill()
    (run,) = json.loads(done.stdout)["runs"]
    assert (done.code, run["verdict"]) == (0, "passed"), done.stderr
    (recovery,) = run["recoveries"]
    assert recovery["struck"] == recovery["blamed"] == [1]
    assert recovery["phases_ms"].keys() == {"still", "notice", "end", "begin", "step"}
    assert run["evidence"]["weights"]["status"] == run["evidence"]["losses"]["status"] == "same"
    folder = launched.folder / run["run_dir"]
    began = [each["pid"] for each in events_in(folder, "RankBegan") if each["rank"] == 1]
    assert [each["pids"] for each in events_in(folder, "StrikeMade")] == [began[:1]] and len(began) == 2
    # Steps may follow the one of the fault until it strikes; a checkpoint is written behind each tenth.
    reports = events_in(folder, "StepReport")
    first_again = min(each["step"] for each in reports if each["process"].startswith(str(began[1])))
    assert first_again % 10 == 0 and recovery["lost_steps"] == recovery["step"] + 1 - first_again


def test_the_example_reports_its_steps_and_resumes(tmp_path: Path) -> None:
    """The job of the documentation, in one rank and twice in one process, which imports its optimizer once."""
    (tmp_path / "reports").mkdir()
    again = "import runpy, sys\nfor steps in '24':\n    sys.argv[3] = steps\n"
    again += "    runpy.run_path(sys.argv[0], run_name='__main__')"
    code = "import sys; sys.argv = sys.argv[1:]\n" + again
    job = (str(ROOT / "docs/examples/any_job.py"), str(tmp_path), "--steps", "0", "--every", "2")
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    environment = os.environ | alone | {"PYTHONPATH": str(ROOT), "BAMBOO_PROGRESS": str(tmp_path / "reports")}
    subprocess.run([sys.executable, "-c", code, *job], env=environment, check=True, timeout=100)
    steps = [each.step for each in ReportedSteps(tmp_path / "reports").read()]
    assert steps == [0, 1, 2, 3], "the second time it goes on"


def test_each_kind_of_fault_has_its_recovery(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "all.yaml").write_text(
        HEAD + "faults:\n"
        "  - {id: pause, at: {step: 10, rank: 0}, do: pause, for: 2500ms}\n"
        "  - {id: slow, at: {progress: 25%}, target: {rank: 1}, do: slow, factor: 4, for: 200ms}\n"
        "  - {id: kill, at: {step: 35, rank: 1}, do: kill}\n"
        "  - {id: again, at: {during: restart}, target: {rank: 1}, do: kill}\n"
        "expect: {steps_lost: 1, culprit: exact, leftovers: none}\n"
    )
    done = launch("inject", str(tmp_path / "all.yaml"), "--json", "--", *TOY, "{folder}", "60", "2").wait()
    (run,) = json.loads(done.stdout)["runs"]
    assert (done.code, run["verdict"]) == (0, "passed"), done.stderr
    assert [each["faults"] for each in run["recoveries"]] == [["pause"], ["slow"], ["kill", "again"]]
    assert run["recoveries"][0]["stall_ms"] > 2300
    assert [each["silent"] for each in run["recoveries"]] == [[0], [], []], "the other rank waits, and works for that"


def test_what_a_job_leaves_behind_is_named_and_ended(launch: Launch, tmp_path: Path) -> None:
    faults = "faults:\n  - {at: {step: 5}, target: {launcher: true}, do: kill}\n"
    (tmp_path / "left.yaml").write_text(f"{HEAD}{faults}expect: {{outcome: failed, leftovers: none}}\n")
    launched = launch("inject", str(tmp_path / "left.yaml"), "--json", "--", *TOY, "{folder}", "9999", "0", "child")
    done = launched.wait()
    checks = {each["name"]: each for each in json.loads(done.stdout)["runs"][0]["checks"]}
    assert done.code == 1 and checks["outcome"]["result"] == "passed"
    assert checks["leftovers"]["result"] == "failed" and "time.sleep(600)" in checks["leftovers"]["text"]
    assert launched.processes() == {}


def test_a_killed_bamboo_leaves_no_process_behind(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "stop.yaml").write_text(HEAD + "faults:\n  - {at: {step: 5, rank: 0}, do: stop}\n")
    launched = launch("inject", str(tmp_path / "stop.yaml"), "--", *TOY, "{folder}", "9999", "0", "child")
    events = launched.folder / "results/external/latest/events.jsonl"
    launched.wait_until(lambda: events.exists() and "stands still" in events.read_text())
    assert len(launched.processes()) > 5
    launched.process.kill()
    launched.process.wait()
    until_s = time.monotonic() + 5
    while launched.processes() and time.monotonic() < until_s:
        time.sleep(0.02)
    assert launched.processes() == {}


def test_a_job_that_runs_already_is_struck_and_left_running(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "pause.yaml").write_text(
        HEAD + "faults:\n  - {at: {after: 100ms}, target: {rank: 1}, do: pause, for: 100ms}\nexpect: {steps_lost: 0}\n"
    )
    (tmp_path / "reports").mkdir()
    environment = {**os.environ, "BAMBOO_PROGRESS": str(tmp_path / "reports")}
    with subprocess.Popen([*TOY, str(tmp_path), "9999", "0"], env=environment) as job, ExitStack() as stack:
        stack.callback(job.terminate)  # if an assertion fails too: the job has no end of its own
        while not list((tmp_path / "reports").glob("1-*")):
            time.sleep(0.01)
        done = launch("inject", str(tmp_path / "pause.yaml"), "--attach", str(job.pid), "--json").wait()
        (run,) = json.loads(done.stdout)["runs"]
        assert (done.code, run["verdict"]) == (0, "passed"), done.stderr
        assert run["recoveries"][0]["resumed"] and job.poll() is None
        (tmp_path / "stop.yaml").write_text(
            f"{HEAD}faults:\n  - {{at: {{after: 0s}}, target: {{rank: 1}}, do: stop}}\n"
        )
        killed = launch("inject", str(tmp_path / "stop.yaml"), "--attach", str(job.pid))
        events = killed.folder / "results/external/latest/events.jsonl"
        killed.wait_until(lambda: events.exists() and "stands still" in events.read_text())
        killed.process.kill()  # the rank that stands still goes on
        reached, until_s = (tmp_path / "step-1").read_text(), time.monotonic() + 5
        while (tmp_path / "step-1").read_text() == reached and time.monotonic() < until_s:
            time.sleep(0.01)
        assert (tmp_path / "step-1").read_text() != reached


OWN_LAUNCHER = """
import os, subprocess, sys, time

def rank(number):
    for step in range(int(sys.argv[1]), 60):
        time.sleep(0.02)
        print(f"rank {number} did step {step}", flush=True)

def start(number, first):
    own = {**os.environ, "MY_RANK": str(number), "GROUP_RANK": str(number // 2)}
    return subprocess.Popen([sys.executable, __file__, str(first)], env=own)

if "MY_RANK" in os.environ:
    rank(os.environ["MY_RANK"])
else:
    ranks = {number: start(number, 0) for number in range(4)}
    while any(each.poll() is None for each in ranks.values()):
        for number, each in ranks.items():
            if each.poll():
                print(f"lost {number}, starting it again", flush=True)
                ranks[number] = start(number, 20)
        time.sleep(0.01)
"""
PACKAGE = """
from bamboo import Launcher

mine = Launcher(
    "another name",
    variables=("MY_RANK",),
    blame=r"lost (?P<rank>\\d+)",
    progress=r"rank (?P<rank>\\d+) did step (?P<step>\\d+)",
)
"""


def test_a_launcher_of_a_package_of_the_user_has_its_ranks_steps_and_blame(launch: Launch, tmp_path: Path) -> None:
    """Its group is struck as one: both ranks of an agent."""
    (tmp_path / "job.py").write_text(OWN_LAUNCHER)
    (tmp_path / "my_adapter.py").write_text(PACKAGE)
    (tmp_path / "my_adapter-1.0.dist-info").mkdir()
    (tmp_path / "my_adapter-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: my-adapter\nVersion: 1.0\n"
    )
    (tmp_path / "my_adapter-1.0.dist-info/entry_points.txt").write_text("[bamboo.launchers]\nmine = my_adapter:mine\n")
    (tmp_path / "group.yaml").write_text(
        HEAD.replace("torchrun", "mine") + "faults:\n  - {at: {step: 25, rank: 0}, target: {group: 1}, do: kill}\n"
        "expect: {culprit: exact, leftovers: none}\n"
    )
    command = (sys.executable, str(tmp_path / "job.py"))
    path = f"{tmp_path}:{ROOT}"
    done = launch("inject", str(tmp_path / "group.yaml"), "--json", "--", *command, PYTHONPATH=path).wait()
    (run,) = json.loads(done.stdout)["runs"]
    assert (done.code, run["verdict"]) == (0, "passed"), done.stderr
    (recovery,) = run["recoveries"]
    assert recovery["struck"] == recovery["blamed"] == recovery["ended"] == [2, 3]
    assert recovery["step"] >= 25 and recovery["lost_steps"] > 0


IN_PROCESS = """
import os, subprocess, sys, time
import bamboo

def train(first):
    for step in range(first, 60):
        time.sleep(0.02)
        bamboo.progress(step)

if "RANK" not in os.environ:
    ranks = [subprocess.Popen([sys.executable, *sys.argv], stdin=-1, env={**os.environ, "RANK": each}) for each in "01"]
    ranks[0].wait()
    ranks[1].communicate(b"!")
elif os.environ["RANK"] == "0":
    train(0)
else:
    sys.stdin.read()  # it stands by
    print("rank=1 term_ex: RankShouldRestart('Interruption.TERMINATED on ranks={0}')", flush=True)
    os.environ["RANK"] = "0"  # as NVRx does
    train(20)
"""


def test_a_process_that_stood_by_becomes_the_rank_that_it_reports(launch: Launch, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(IN_PROCESS)
    (tmp_path / "kill.yaml").write_text(
        HEAD.replace("torchrun", "nvrx-inprocess") + "faults:\n  - {at: {step: 25}, target: {rank: 0}, do: kill}\n"
        "expect: {culprit: exact, leftovers: none}\n"
    )
    done = launch(
        "inject", str(tmp_path / "kill.yaml"), "--json", "--", sys.executable, str(tmp_path / "job.py")
    ).wait()
    (run,) = json.loads(done.stdout)["runs"]
    assert (done.code, run["verdict"]) == (0, "passed"), done.stderr
    (recovery,) = run["recoveries"]
    assert recovery["struck"] == recovery["blamed"] == recovery["ended"] == [0]
    assert recovery["lost_steps"] == recovery["step"] - 19
    assert recovery["phases_ms"].keys() == {"still", "notice", "end", "begin", "step"}
