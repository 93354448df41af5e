"""The processes that a user's layer starts end with their worker, with their run, and after SIGKILL of the launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.runtime.process import descendants
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.kernel import is_alive
from engine.runtime.process.prctl import adopting
from tests.e2e.launcher import ROOT, Launcher

# The factory is called in each worker. Every way to leave a worker writes the pid of the child.
MODEL = """
import os, signal, subprocess, sys, time
from pathlib import Path
from torch import nn

FOLDER = Path("children")
SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]

def forked(then):
    if (pid := os.fork()) == 0:
        then()
        time.sleep(600)
    return pid

def twice():
    os.setsid()
    if (pid := os.fork()) == 0:
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)
        told("a daemon", os.getpid())
        time.sleep(600)
    os._exit(0)

def told(kind, pid):
    folder = FOLDER / str(PARENT)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / kind).write_text(str(pid))

def model():
    global PARENT
    PARENT = os.getpid()
    told("a child without exec", forked(lambda: None))
    told("a program", subprocess.Popen(SLEEP).pid)
    told("a program with a session", subprocess.Popen(SLEEP, start_new_session=True).pid)
    told("a program without environment", subprocess.Popen(SLEEP, env={}).pid)
    told("a stopped program", (stopped := subprocess.Popen(SLEEP, start_new_session=True)).pid)
    os.kill(stopped.pid, signal.SIGSTOP)
    os.waitpid(forked(twice), 0)
    return nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), Slow())

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.02)
        return x
"""
KINDS = {
    "a child without exec",
    "a program",
    "a program with a session",
    "a program without environment",
    "a stopped program",
    "a daemon",
}


class Run:
    """A run whose workers have children."""

    def __init__(self, folder: Path, steps: int, *arguments: str):
        size = ["--stages", "3", "--microbatches", "2", "--steps", str(steps), "--audit", "0", "--no-check-pure"]
        command = ["run", "--model", "parents:model", "--data", "synthetic", "--redundancy", "lazy", *size, *arguments]
        self.launcher = Launcher(folder / "run", command, {}, files={"parents.py": MODEL})

    def worker(self, number: int) -> int:
        """Returns the pid of a worker; a child without exec has the name of its worker."""
        return next(each["child"] for each in self.launcher.events("started") if each["of"] == number)

    def children(self, number: int) -> dict[str, int]:
        """Returns the children that a worker has told, by kind."""
        folder = self.launcher.folder / "children" / str(self.worker(number))
        return {each.name: int(each.read_text()) for each in folder.iterdir()} if folder.exists() else {}

    def wait_until_training(self) -> list[dict[str, int]]:
        """Returns the children of the workers once a step is committed."""
        self.launcher.wait_until(lambda: self.launcher.events("commit"), 60)
        found = [self.children(worker) for worker in range(3)]
        assert all(each.keys() == KINDS for each in found)
        assert all(is_alive(pid) for each in found for pid in each.values())
        return found


@pytest.fixture(name="start")
def _start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def start(*arguments: str, steps: int = 10_000) -> Run:
        runs.append(Run(tmp_path / str(len(runs)), steps, *arguments))
        return runs[-1]

    yield start
    for run in runs:
        run.launcher.kill_all()
        for told in (run.launcher.folder / "children").glob("*/*"):
            if is_alive(pid := int(told.read_text())):
                os.kill(pid, signal.SIGKILL)


def gone(children: dict[str, int], within_s: float = 5.0) -> list[str]:
    """Returns the kinds of children that still live after some seconds."""
    until_s = time.monotonic() + within_s
    while (left := [kind for kind, pid in children.items() if is_alive(pid)]) and time.monotonic() < until_s:
        time.sleep(0.01)
    return left


@pytest.mark.e2e
def test_children_end_with_their_worker_and_after_sigkill_of_the_launcher(start: Callable[..., Run]) -> None:
    """Before, the children of a killed worker, and of the workers of a killed launcher, stayed for ever."""
    run = start()
    first, second, third = run.wait_until_training()
    os.kill(run.worker(1), signal.SIGKILL)
    assert gone(second) == []
    commits = len(run.launcher.events("commit"))
    run.launcher.wait_until(lambda: len(run.launcher.events("commit")) > commits + 2, 30)
    for other in (first, third):
        assert all(is_alive(pid) for pid in other.values())  # theirs live on
    os.kill(run.worker(0), signal.SIGSTOP)  # a stopped worker ends, too
    os.kill(run.launcher.processes()["bamboo-fork"], signal.SIGKILL)
    run.launcher.process.kill()
    for other in (first, third):
        # Without a launcher, only the mark in the environment tells.
        assert gone({kind: pid for kind, pid in other.items() if kind != "a program without environment"}) == []
    assert gone({"the stopped worker": run.worker(0)}) == []


@pytest.mark.e2e
def test_children_end_with_a_fault_and_at_the_end_of_a_run(start: Callable[..., Run]) -> None:
    """Before, they stayed after an injected kill, and after the end of the run."""
    run = start("--kill", "3:1", "--no-twin", steps=12)
    children = run.wait_until_training()
    done = run.launcher.wait(60)
    assert done.code == 0, done.stderr
    assert [gone(each, 0.0) for each in children] == [[], [], []]
    assert run.launcher.leftovers() == []


SLEEPER = "import time; time.sleep(600)"


def sleeper(**environment: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-S", "-c", SLEEPER], env={**os.environ, **environment})


def test_only_processes_with_the_mark_are_ended() -> None:
    """Before, no rule said which children a launcher may end; one of an embedding program must live."""
    mine, other, stranger = sleeper(_BAMBOO_LAUNCHER="mine"), sleeper(_BAMBOO_LAUNCHER="mine2"), sleeper()
    own = sleeper(_BAMBOO_LAUNCHER="mine")
    try:
        descendants.end_adopted("mine", {own.pid}, ())
        assert not is_alive(mine.pid)
        assert all(each.poll() is None for each in (other, stranger, own))
    finally:
        for each in (mine, other, stranger, own):
            each.kill()
            each.wait()


def test_a_whole_tree_ends_and_is_reaped() -> None:
    """Before, a launcher did not adopt the children of its workers."""
    tree = "import subprocess, sys; [subprocess.Popen([sys.executable, '-c', sys.argv[1]]) for _ in range(3)]"
    with adopting():
        subprocess.run(
            [sys.executable, "-c", tree, SLEEPER], env={**os.environ, "_BAMBOO_LAUNCHER": "tree"}, check=True
        )
        before = [pid for pid in descendants._children() if descendants.has_mark(pid, "tree")]
        assert len(before) == 3
        descendants.end_adopted("tree", (), ())
        assert not set(before) & set(descendants._children())


def test_the_sweeper_ends_with_its_server_and_has_nothing_of_the_user() -> None:
    """Before, there was none; one that outlived each run would be a leak itself."""
    with ForkServer() as server:
        pid = server._sweeper.pid
        assert Path(f"/proc/{pid}/environ").read_bytes() in (
            b"",
            *[f"LD_LIBRARY_PATH={each}\0".encode() for each in (os.environ.get("LD_LIBRARY_PATH"),) if each],
        )
        assert {os.readlink(f"/proc/{pid}/fd/{number}") for number in (0, 1, 2)} == {os.devnull}
    assert not is_alive(pid)


HALF_FORKED = """
import os, sys, time
from engine.runtime.process.fork_client import ForkServer
server = ForkServer()
with server.forking():  # the intermediate process lives as long as this block
    print(server.fork("store", "half", os.open(os.devnull, os.O_WRONLY)).pid, flush=True)
    time.sleep(600)
"""


def test_a_stopped_child_of_a_launcher_that_is_killed_while_it_forks_ends() -> None:
    """Before, a child beside the intermediate process had no death signal yet, and stayed for ever."""
    with subprocess.Popen([sys.executable, "-c", HALF_FORKED], cwd=ROOT, stdout=subprocess.PIPE) as launcher:
        assert launcher.stdout is not None
        child = int(launcher.stdout.readline())
        os.kill(child, signal.SIGSTOP)
        launcher.kill()
    assert gone({"the stopped child": child}) == []
