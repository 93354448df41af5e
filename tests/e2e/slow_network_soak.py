"""``python -m tests.e2e.slow_network_soak``: three hosts on a slow network, for some minutes; then one is cut off.

The members of etcd are as far apart as the hosts: a first call to them takes over a second at 200 ms. While the network
is only slow, no verdict may come. After the cut, one must come, in the time that the round trips allow. The table says
both.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.core.history.process_records import NetworkRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord
from engine.files.events_file import read_history
from engine.harness.testbed import BedEtcd, HostBed, _entering
from tests.e2e.launcher import ROOT

_JOB = "model: mlp\nstages: 3\nmicrobatches: 2\nsteps: 1000000\naudit: 0\nvalidate_every: 0\ncheckpoint_every: 0\n"
_BEGIN_S, _LOST_S, _LOOK_S = 120.0, 30.0, 0.5
_ALL, _SOL_PACKET, _VNET_HEADER, _MEMBERSHIP, _PROMISCUOUS, _OUTGOING = 3, 263, 15, 1, 1, 4  # of linux/if_packet.h


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


def switch(half_ms: float, names: Sequence[str]) -> None:
    """Carries each frame between these links after a while, as netem would, which not every kernel has."""
    ports = {}
    for name in names:
        port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
        port.setsockopt(_SOL_PACKET, _VNET_HEADER, 1)  # with checksums and segments that are to be made yet
        port.bind((name, 0))
        told = struct.pack("iHH8s", socket.if_nametoindex(name), _PROMISCUOUS, 0, b"")
        port.setsockopt(_SOL_PACKET, _MEMBERSHIP, told)
        port.setblocking(False)
        ports[port.fileno()] = port
    frames: deque[tuple[float, int, bytes]] = deque()
    dice = random.Random(0)  # noqa: S311 - no secret
    while True:
        wait_s = max(0.0, frames[0][0] - time.monotonic()) if frames else None
        for fd in select.select(list(ports), [], [], wait_s)[0]:
            with contextlib.suppress(OSError):  # a link that was cut
                data, where = ports[fd].recvfrom(1 << 17)
                if where[2] != _OUTGOING:
                    due_s = time.monotonic() + half_ms * dice.uniform(0.9, 1.1) / 1e3
                    frames.append((max(due_s, frames[-1][0]) if frames else due_s, fd, data))
        while frames and frames[0][0] <= time.monotonic():
            _, source, data = frames.popleft()
            for fd, port in ports.items():
                if fd != source:
                    with contextlib.suppress(OSError):
                        port.send(data)


@contextlib.contextmanager
def slow(bed: HostBed, round_trip_ms: float) -> Iterator[None]:
    """Puts a slow switch in the place of the bridge of a bed."""
    if not round_trip_ms:
        yield
        return
    links = [f"to-{host.name}" for host in bed.hosts]
    for each in links:
        bed.call("ip", "link", "set", each, "nomaster")
    words = [sys.executable, "-m", "tests.e2e.slow_network_soak", "--switch", str(round_trip_ms / 2), *links]
    with subprocess.Popen(
        [*_entering(bed._pid), "--", *words], env={**os.environ, "PYTHONPATH": str(ROOT)}
    ) as switching:
        try:
            yield
        finally:
            switching.kill()


def main() -> None:
    """Prints the table; exits with 1 after a verdict on a healthy host, or none on the one that was cut."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--round-trip-ms", type=float, default=200.0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--switch", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.switch:
        switch(float(given.switch[0]), given.switch[1:])
    with tempfile.TemporaryDirectory(prefix="slow-network-") as name, HostBed(3) as bed:
        folder = Path(name)
        with slow(bed, given.round_trip_ms), BedEtcd(bed.hosts, folder) as etcd:
            begun(bed, etcd, folder)
            told = {each.of: each for each in waited_for(folder, _BEGIN_S, is_lost=False).of(NetworkRecord)}
            time.sleep(given.minutes * 60)
            history = waited_for(folder, _BEGIN_S, is_lost=False)
            told |= {each.of: each for each in history.of(NetworkRecord)}
            early, steps = verdicts(history), len(history.of(CommitRecord)) or history.committed + 1
            print(*told.values(), sep="\n")
            print(f"{len(early)} verdicts in {given.minutes:g} minutes and {steps} steps", *early, sep="\n")
            if early:
                raise SystemExit(1)
            cut_ns = time.monotonic_ns()
            next(host for host in bed.hosts if host.name in told).cut()
            ((at_ns, reason), *_) = verdicts(waited_for(folder, _LOST_S, is_lost=True))
            print(f"the verdict came {(at_ns - cut_ns) / 1e9:.2f} s after the cut: {reason}")


if __name__ == "__main__":
    main()
