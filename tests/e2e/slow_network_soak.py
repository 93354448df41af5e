"""``python -m tests.e2e.slow_network_soak``: three hosts on a slow network, for some minutes; then one is cut off.

The members of etcd are as far apart as the hosts: a first call to them takes over a second at 200 ms. While the network
is only slow, no verdict may come. After the cut, one must come, in the time that the round trips allow. The table says
both. With `--round-trip-ms 0` frames are not held up: a round trip takes what the hosts need.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from engine.core.history.process_records import NetworkRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord
from engine.core.protocol.run_status import status_of_history
from engine.files.events_file import read_history
from engine.harness.testbed import BedEtcd, HostBed
from tests.e2e.launcher import ROOT

_JOB = """
model: timed
model_args: {forward_ms: 50}  # the hosts share a machine, and busy ones would look like a slow network
stages: 3
microbatches: 2
steps: 1000000
audit: 0
validate_every: 0
checkpoint_every: 0
"""
_BEGIN_S, _LOST_S, _LOOK_S = 120.0, 30.0, 0.5


def begun(bed: HostBed, etcd: BedEtcd, folder: Path) -> dict[str, subprocess.Popen[bytes]]:
    """Starts the agent of each host."""
    (folder / "job.yaml").write_text(_JOB)
    words = [sys.executable, "-m", "bamboo_cli", "agent", str(folder / "job.yaml"), "--run", "r", "--hosts", "3"]
    words += ["--trusted-network", "10.99.0.0/24"]
    agents = {}
    for host in bed.hosts:
        own = ["--node", host.name, "--address", host.address, "--results", str(folder / host.name)]
        with (folder / f"{host.name}.log").open("wb") as log:
            environment = {**etcd.variables, "PYTHONPATH": str(ROOT)}
            agents[host.name] = host.start(*words, *own, environment=environment, log=log)
    return agents


def history_of(folder: Path) -> RunHistory | None:
    """Returns the history of the host that coordinates, None before the round trips are known."""
    for path in folder.glob("h*/*/events.jsonl"):
        if '"event":"network"' in path.read_text(errors="replace"):
            return read_history(path)
    return None


def verdicts(history: RunHistory) -> list[tuple[int, str]]:
    """Returns the time and the reason of each epoch behind the first one."""
    return [(each.at_ns, each.reason) for each in history.epochs if each.epoch > 1]


def waited_for(folder: Path, limit_s: float, *, is_lost: bool) -> RunHistory:
    """Waits until the round trips of both other hosts are known, or with `is_lost` for a verdict."""
    until_s = time.monotonic() + limit_s
    while time.monotonic() < until_s:
        history = history_of(folder)
        if history is not None and (verdicts(history) if is_lost else len(history.of(NetworkRecord)) > 1):
            return history
        time.sleep(_LOOK_S)
    logs = "\n".join((folder / f"h{number}.log").read_text()[-2000:] for number in range(3))
    raise SystemExit(f"not within {limit_s:g} s:\n{logs}")


def main() -> None:
    """Prints the table; exits with 1 after a verdict on a healthy host, or none on the one that was cut."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--round-trip-ms", type=float, default=200.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--known-within", type=float, default=_LOST_S, help="seconds until the verdict on the dead host"
    )
    parser.add_argument("--leader", action="store_true", help="the host that is cut off leads etcd")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="slow-network-") as name, HostBed(3) as bed:
        folder = Path(name)
        if given.round_trip_ms:
            bed.slow(given.round_trip_ms)
        with BedEtcd(bed.hosts, folder) as etcd:
            begun(bed, etcd, folder)
            told = {each.of: each for each in waited_for(folder, _BEGIN_S, is_lost=False).of(NetworkRecord)}
            time.sleep(given.minutes * 60)
            history = waited_for(folder, _BEGIN_S, is_lost=False)
            told |= {each.of: each for each in history.of(NetworkRecord)}
            early, steps = verdicts(history), len(history.of(CommitRecord)) or history.committed + 1
            print(*status_of_history("r", history).policy, sep="\n")
            print(f"{len(early)} verdicts in {given.minutes:g} minutes and {steps} steps", *early, sep="\n")
            if early:
                raise SystemExit(1)
            lost = next(host for host in bed.hosts if host.name in told)
            etcd.lead(lost if given.leader else next(host for host in bed.hosts if host.name not in told))
            cut_ns = time.monotonic_ns()
            lost.cut()
            ((at_ns, reason), *_) = verdicts(waited_for(folder, _LOST_S, is_lost=True))
            print(f"the verdict came {(late_s := (at_ns - cut_ns) / 1e9):.2f} s after the cut: {reason}")
            raise SystemExit(late_s > given.known_within)


if __name__ == "__main__":
    main()
