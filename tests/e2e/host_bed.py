"""Several hosts as processes of this machine, each with an address of its own, and the etcd in which they meet."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from engine.core.job.job import Job
from engine.files.run_folder import RunFolder
from engine.files.trajectory_file import trajectory_rows
from engine.runtime.store.embedded_etcd import find_etcd
from tests.e2e.launcher import Done, Launcher

_START_S = 20.0


class HostBed:
    """The agents of one run, by the names h1, h2 and so on; h1 has the address 127.0.0.1."""

    def __init__(self, folder: Path, etcd: str, number: int, arguments: Sequence[str]):
        self.agents: dict[str, Launcher] = {}
        self.etcd, self.run_id = etcd, folder.name
        for each in range(1, number + 1):
            place = ["--node", f"h{each}", "--address", f"127.0.0.{each}"]
            line = ["agent", "--run", folder.name, "--etcd", etcd, "--hosts", str(number), *place, *arguments]
            self.agents[f"h{each}"] = Launcher(folder / f"h{each}", line, {})

    @property
    def chief(self) -> Launcher:
        """The agent that coordinates, once training has begun."""
        return next(each for each in self.agents.values() if each.events("commit"))

    @property
    def others(self) -> dict[str, Launcher]:
        """All other agents."""
        return {name: each for name, each in self.agents.items() if each is not self.chief}

    def until_commits(self, number: int) -> None:
        """Waits for commits; fails if an agent ends before."""
        self.until(lambda: any(len(each.events("commit")) >= number for each in self.agents.values()))

    def until_started(self) -> Launcher:
        """Waits for the first worker; returns the agent that coordinates."""
        self.until(lambda: any(each.events("started") for each in self.agents.values()))
        return next(each for each in self.agents.values() if each.events("started"))

    def until(self, is_so: Callable[[], object], timeout_s: float = 100.0, *, lost: Launcher | None = None) -> None:
        """Waits for a condition; fails if an agent ends before that is not `lost`."""
        until_s = time.monotonic() + timeout_s
        while not is_so():
            for name, each in self.agents.items():
                assert each is lost or each.process.poll() is None, f"{name} ended with {each.wait()}"
            assert time.monotonic() < until_s
            time.sleep(0.02)

    def ends(self) -> dict[str, Done]:
        """Waits for the ends of all agents."""
        return {name: each.wait() for name, each in self.agents.items()}

    @property
    def folders(self) -> list[RunFolder]:
        """The run folders of all hosts, that of the one that coordinates first."""
        return [RunFolder(each.run_folder.resolve()) for each in (self.chief, *self.others.values())]

    def trajectory(self) -> list[Any]:
        """Returns the rows of the run."""
        return trajectory_of(self.chief)

    def close(self) -> None:
        """Kills all that is left."""
        for each in self.agents.values():
            each.kill_all()


def trajectory_of(agent: Launcher) -> list[Any]:
    """Returns the rows of a run, from the folder of the agent that has finished it."""
    path = agent.run_folder / "trajectory.csv"
    return [row.texts() for row in trajectory_rows(path.read_text(), path)]


@contextlib.contextmanager
def kept_etcd(folder: Path) -> Iterator[str]:
    """Runs an etcd that listens on loopback; yields its address."""
    ports = []
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            trial = stack.enter_context(socket.socket())
            trial.bind(("127.0.0.1", 0))
            ports.append(trial.getsockname()[1])
    client, peer = (f"http://127.0.0.1:{each}" for each in ports)
    command = [find_etcd(), "--data-dir", str(folder / "member"), "--unsafe-no-fsync", "--log-level=error"]
    command += ["--listen-client-urls", client, "--advertise-client-urls", client, "--listen-peer-urls", peer]
    command += ["--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    with (folder / "etcd.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until_s = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports[0]), 1.0):
                break
            assert time.monotonic() < until_s
            time.sleep(0.05)
        yield f"127.0.0.1:{ports[0]}"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


def settings(job: Job, *names: str) -> list[str]:
    """Returns the options that make a job, of which the fields with these names differ from the default."""
    return [part for name in names for part in ("--set", f"{name}={getattr(job, name)}")]
