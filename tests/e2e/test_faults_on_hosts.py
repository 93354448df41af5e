"""Faults of a run on several hosts strike workers wherever they are: each shows its sign, and no bit changes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.core.action import Action, Op
from engine.core.errors import ExitCode
from engine.core.faults.fault import At, Fault, slot_owner, to_plain
from tests.e2e.host_bed import HostBed, kept_etcd
from tests.e2e.launcher import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]
Hosts = Callable[..., HostBed]
BOTH_HOSTS = """
version: 1
name: both-hosts
about: workers of two hosts stand still, one of them is killed, and so is its heir when it has caught up
job: {model: mlp, stages: 4, microbatches: 2, steps: 10, validate_every: 0, redundancy_level: 2}
faults:
  - {id: pause, at: {step: 2, stage: 0, action: B, microbatch: 1}, do: stop, for: 100ms}
  - {id: other-pause, at: {step: 3, stage: 3, action: F, microbatch: 1}, do: stop, for: 100ms}
  - {id: slow, at: {step: 4, stage: 1, action: F, microbatch: 0}, do: slow, factor: 2, for: 50ms}
  - {id: first, at: {step: 5, stage: 2, action: B, microbatch: 1}, do: kill}
  - {id: second, after: {fault: first, phase: merged}, target: {role: recoverer}, do: kill}
expect: {outcome: recovered, trajectory: identical, steps_lost: 0, culprit: exact}
"""


@pytest.fixture(name="hosts")
def _hosts(tmp_path: Path) -> Iterator[Hosts]:
    """Returns a function that starts the agents of a run on two hosts, with these arguments."""
    beds: list[HostBed] = []
    with kept_etcd(tmp_path) as etcd:

        def start(*arguments: str, number: int = 2) -> HostBed:
            beds.append(HostBed(tmp_path / f"run{len(beds)}", etcd, number, arguments))
            return beds[-1]

        yield start
        for each in beds:
            each.close()


def nodes_of(bed: HostBed) -> dict[str, str]:
    """Returns the host on which each fault has struck."""
    return {each["fault"]: each["node"] for each in bed.chief.events("fault")}


def checks_of(bed: HostBed) -> dict[str, tuple[str, str]]:
    return {each["name"]: (each["result"], each["text"]) for each in bed.chief.events("check")}


def test_faults_of_a_scenario_strike_on_both_hosts(hosts: Hosts, tmp_path: Path) -> None:
    scenario = tmp_path / "both.yaml"
    scenario.write_text(BOTH_HOSTS)
    bed = hosts(str(scenario))
    ends = bed.ends()
    assert {each.code for each in ends.values()} == {0}, ends
    struck = nodes_of(bed)
    assert {*struck.values()} == {"h1", "h2"}
    assert struck["pause"] == struck["slow"] != struck["other-pause"] == struck["first"]
    assert (
        {each["fault"] for each in bed.chief.events("confirmed")}
        == {*struck}
        == {
            "pause",
            "other-pause",
            "slow",
            "first",
            "second",
        }
    )
    assert checks_of(bed)["trajectory"] == ("passed", "identical in 10 of 10 steps")
    assert checks_of(bed)["precision"] == ("passed", "4 faults struck at the planned action")


@pytest.mark.soak
@pytest.mark.parametrize(
    "scenario",
    [
        "adjacent-pair",
        "crash-by-exception",
        "cut-link-healed",
        "delay-link",
        "exit-zero-too-early",
        "flip-bit-in-a-shadow",
        "kill-during-detect",
        "kill-during-fence",
        "kill-during-inventory",
        "kill-during-plan",
        "kill-during-regroup",
        "kill-recoverer-in-heal",
        "kill-recoverer-when-merged",
        "reset-link",
        "slow-worker",
        "stall-link",
        "stop-and-continue-zombie",
        "stop-harmless-pause",
        "terminate-with-enough-grace",
    ],
)
def test_scenarios_of_the_library_hold_on_three_hosts(hosts: Hosts, scenario: str) -> None:
    bed = hosts(scenario, number=3)
    ends = bed.ends()
    assert {each.code for each in ends.values()} == {0}, ends
    assert {result for result, _ in checks_of(bed).values()} == {"passed"}


@pytest.mark.soak
def test_a_running_job_is_struck_through_the_folder_of_the_host_that_coordinates_only(hosts: Hosts) -> None:
    bed = hosts("--set", "model=mlp", "--set", "stages=4", "--set", "steps=300", "--set", "microbatches=4")
    bed.until_commits(3)
    (other,) = bed.others.values()
    name = next(name for name, each in bed.agents.items() if each is bed.chief)
    request = other.run_folder / "request-0.json"
    request.write_text("[]")
    refused = inject(other.run_folder)
    assert refused.returncode == ExitCode.USAGE
    assert f"the run folder of host {name}, which coordinates the run" in refused.stderr
    done = inject(bed.chief.run_folder)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert [each["request"] for each in other.events("refused")] == [request.name]
    assert f"host {name} coordinates the run" in other.events("refused")[0]["reason"]
    assert {each.code for each in bed.ends().values()} == {0}
    assert len(nodes_of(bed)) == 1


def inject(folder: Path) -> subprocess.CompletedProcess[str]:
    """Strikes a running job with a scenario of the library."""
    command = [sys.executable, "-m", "bamboo_cli", "inject", "kill-middle-stage", "--run", folder.name]
    command += ["--results", str(folder.parent)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.soak
def test_the_next_host_that_coordinates_strikes_what_waits_and_tells_what_was_lost(hosts: Hosts) -> None:
    job = ["--set", "model=mlp", "--set", "stages=4", "--set", "steps=200", "--set", "microbatches=2"]
    bed = hosts(*job, "--kill", "3:1", "--kill", "150:2:B:1", number=3)
    bed.until_commits(6)
    lost, others = bed.chief, bed.others
    fault = Fault("asked", At(160, Action(0, Op.B, 1)), (slot_owner(Action(0, Op.B, 1)),))
    with os.fdopen(os.open(lost.run_folder / "request-0.json", os.O_WRONLY | os.O_CREAT, 0o600), "w") as file:
        json.dump([to_plain(fault)], file)
    bed.until(lambda: lost.events("request"))
    bed.until(lambda: any("asked" in str(each.events("heard")) for each in others.values()))
    os.kill(lost.process.pid, signal.SIGKILL)
    ends = {each.wait().code for each in others.values()}
    assert ends == {0}, [each.stderr() for each in others.values()]
    (heir,) = (each for each in others.values() if each.events("commit"))
    assert [each["fault"] for each in heir.events("fault")] == ["150:2:B:1"]
    assert {each["fault"] for each in heir.events("confirmed")} == {"150:2:B:1"}
    assert [each["fault"] for each in heir.events("unconfirmed")] == ["asked"]
    checks = {each["name"]: (each["result"], each["text"]) for each in heir.events("check")}
    assert checks["faults"] == ("passed", "2 faults struck")
    assert checks["trajectory"] == ("passed", "identical in 200 of 200 steps")
    assert "fault asked is unconfirmed" in heir.stderr() + (heir.folder / "stdout").read_text()
    command = [sys.executable, "-m", "bamboo_cli", "status", "--results", str(heir.run_folder.parent)]
    status = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
    assert "fault asked is unconfirmed: it waited with host" in " ".join(status.split())
