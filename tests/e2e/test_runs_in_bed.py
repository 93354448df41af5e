"""Runs on three hosts of a bed, with clocks an hour apart and an etcd over TLS: the same bits as on one host."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from engine.core.checks.recoveries import recoveries
from engine.core.history.process_records import ClockRecord
from engine.core.history.run_records import ActionRecord, CommitRecord
from engine.core.history.step_files import done_in
from engine.files.events_file import read_history
from engine.files.host_folders import collect, folders_of
from engine.harness.host_checks import hosts_error
from engine.harness.testbed import BedEtcd, BedHost, HostBed

pytestmark = [pytest.mark.e2e, pytest.mark.soak, pytest.mark.timeout(300)]
BAMBOO = str(Path(sys.executable).with_name("bamboo"))
JOB = "model: gpt\nstages: 3\nsteps: 20\ncheckpoint_every: 0\n"
LOST_AT = 6  # commits


def begun(bed: HostBed, etcd: BedEtcd, folder: Path) -> dict[str, subprocess.Popen[bytes]]:
    """Starts the same line on each host."""
    agents = {}
    for host in bed.hosts:
        words = ["agent", str(folder / "job.yaml"), "--run", "r", "--hosts", "3", "--node", host.name]
        words += ["--address", host.address, "--trusted-network", "10.99.0.0/24", "--results", str(folder / "results")]
        with (folder / f"{host.name}.log").open("wb") as log:
            agents[host.name] = host.start(BAMBOO, *words, environment=etcd.variables, log=log)
    return agents


def found(bed: HostBed, folder: Path, *, coordinates: bool) -> BedHost:
    """Waits for some commits; returns the host that coordinates, or another one."""
    until_s = time.monotonic() + 120
    while time.monotonic() < until_s:
        told = "".join((folder / f"{host.name}.log").read_text() for host in bed.hosts)
        lead = re.search(r"host (h\d) coordinates", told)
        events = [path.read_text() for path in (folder / "results").glob("*/events.jsonl")]
        if lead and any(text.count('{"event":"commit"') >= LOST_AT for text in events):
            return next(host for host in bed.hosts if (host.name == lead[1]) is coordinates)
        time.sleep(0.1)
    raise AssertionError("there is no commit")


def run_of(folder: Path, told: str) -> Path:
    """Returns the run folder whose events have these words."""
    (found,) = (path.parent for path in (folder / "results").glob("*/events.jsonl") if told in path.read_text())
    return found


def recorded_at(run: Path) -> Counter[int]:
    """Returns the times of all that a host has recorded: its events, and the actions and hashes of its workers."""
    texts = [path.read_text() for path in (run / "events.jsonl", *(run / "steps").glob("*.jsonl"))]
    found = Counter(json.loads(line)["at_ns"] for text in texts for line in text.splitlines())
    for path in (run / "steps").glob("*.bin"):
        found.update(end_ns for _, _, end_ns, _ in done_in(path.read_bytes()))
    return found


def missing_s(folder: Path, lost: str) -> float:
    """Returns how old the first record was that only the disk of the lost host has, when its power went."""
    whole, end = recorded_at(run_of(folder, f'"node":"{lost}",')), run_of(folder, '"event":"training_ended"')
    kept = recorded_at(end / "hosts" / lost)
    assert kept <= whole
    return (max(whole) - min((whole - kept) or [max(whole)])) / 1e9


def trajectory_of(text: str) -> str:
    found = re.search(r"trajectory ([0-9a-f]+)", text)
    assert found is not None, text
    return found[1]


@pytest.mark.parametrize("loses", ["none", "another", "coordinating"])
def test_three_hosts_compute_the_bits_of_one_also_if_the_power_of_one_goes(tmp_path: Path, loses: str) -> None:
    if why := hosts_error():
        pytest.skip(why)
    (tmp_path / "job.yaml").write_text(JOB)
    command = [BAMBOO, "run", str(tmp_path / "job.yaml"), "--results", str(tmp_path / "one")]
    one = subprocess.run(command, capture_output=True, text=True, check=True)
    with HostBed(3, 3600) as bed, BedEtcd(bed.hosts, tmp_path) as etcd:
        agents = begun(bed, etcd, tmp_path)
        lost = found(bed, tmp_path, coordinates=loses == "coordinating") if loses != "none" else None
        if lost is not None:
            lost.power_off()
        codes = {name: each.wait(150) for name, each in agents.items() if lost is None or name != lost.name}
    logs = {name: (tmp_path / f"{name}.log").read_text() for name in agents}
    assert set(codes.values()) == {0}, logs
    assert trajectory_of("".join(logs.values())) == trajectory_of(one.stdout)

    if lost is not None:
        age_s = missing_s(tmp_path, lost.name)
        print(f"of the last {age_s:.3f} s of host {lost.name} some records are lost")
        assert age_s <= 0.5
    one_disk = shutil.copytree(run_of(tmp_path, '"event":"training_ended"'), tmp_path / "disk" / "run")
    told = collect(folders_of(tmp_path, str(one_disk), ()))
    assert {each["node"] for each in told["hosts"] if each["incomplete"]} == ({lost.name} if lost else set())
    merged = read_history(Path(told["run_dir"]) / "events.jsonl", every_action=True)
    assert {each.worker for each in merged.of(ActionRecord)} == {0, 1, 2}
    assert [each.step for each in merged.of(CommitRecord)] == list(range(20))
    assert {each.of for each in merged.of(ClockRecord)} == {"h0", "h1", "h2"} - {told["reference"]}
    seen = recoveries(merged.records_of_recoveries)
    assert [len(each.verdict) for each in seen] == ([1] if lost else [])
    for each in seen:
        within_ns = max(each.uncertain_ns.values(), default=0)  # of a phase on one host there is none
        assert within_ns < 100_000_000  # of clocks that are hours apart
    assert json.dumps(told)
