"""A file system that is frozen under results or checkpoints, as a dead file server is: the launcher ends."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from engine.core.errors import ExitCode
from engine.core.history.run_records import UnkeptRecord
from engine.files.events_file import read_history
from engine.runtime.agent import checkpoints
from engine.runtime.agent.keeper import fork_keeper
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.kernel import process_state
from engine.runtime.process.subprocesses import is_readable
from tests.runtime.test_keeper import Run

LIMIT_S = 2.0  # in place of half a minute for the disk, and of ten seconds for the ends of processes
ENDS_S = 25.0  # that the ends of all processes may take behind it: four kinds of them, of which each has seconds
TOOLS = ("mkfs.ext4", "mount", "umount", "fsfreeze")


def call(*command: object) -> None:
    subprocess.run([str(each) for each in command], check=True, capture_output=True, timeout=20)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small file system of its own; it is thawed and gone in the end."""
    if lacking := [each for each in TOOLS if shutil.which(each) is None]:
        pytest.skip(f"no {', '.join(lacking)} here")
    if os.geteuid():
        pytest.skip("needs root, to freeze a file system")
    image, place = tmp_path / "image", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)  # of which a store takes 64 MiB
    call("mkfs.ext4", "-q", "-O", "^has_journal", image)
    try:
        call("mount", "-o", "loop", image, place)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no loop device can be mounted here: {error.stderr.decode().strip()}")
    try:
        yield place
    finally:
        with contextlib.suppress(subprocess.CalledProcessError):  # a test has thawed it
            call("fsfreeze", "-u", place)
        call("umount", "-l", place)


def test_a_frozen_disk_holds_no_launcher(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waited in `unlinkat` itself, until the thaw: two SIGINTs and SIGKILL changed nothing."""
    monkeypatch.setattr(checkpoints, "_END_S", 1.0)
    with ForkServer() as server:
        run = Run(disk, partial(fork_keeper, server))
        with run.keeper:
            run.write(0)
            call("fsfreeze", "-f", disk)
            run.agree(0)
            run.checkpoints.close()
            assert [type(each) for each in run.records] == [UnkeptRecord]
            assert run.records[0].why.endswith("has not answered for 1 s")
            (left, _) = run.state.notes
            pid = int(re.findall(r"pid (\d+)", left)[0])
            pidfd = os.pidfd_open(pid)
            assert process_state(pid, pidfd) == "D", "it waits for the disk, and SIGKILL does not end it"
    call("fsfreeze", "-u", disk)
    assert is_readable(pidfd, 20.0), "it ends with the thaw"
    os.close(pidfd)


CODE = """
import subprocess, sys
from engine.core.hosts import ends
from engine.harness import case_runner
from engine.runtime.agent import session
from engine.runtime.agent import orders
from engine.runtime.process import fork_client

def freezes(module, name, disk):
    before = getattr(module, name)
    def freeze(*given, **more):
        setattr(module, name, before)
        subprocess.run(["fsfreeze", "-f", disk], check=True)
        return before(*given, **more)
    setattr(module, name, freeze)

limit_s, place, disk = float(sys.argv[1]), sys.argv[2], sys.argv[3]
if limit_s:
    orders.LIMIT_S, ends.GONE_NS, fork_client._GRACE_S = limit_s, int(limit_s * 1e9), limit_s
if place:
    freezes({"session": session, "case_runner": case_runner}[place.split(".")[0]], place.split(".")[1], disk)
sys.argv = ["bamboo", *sys.argv[4:]]
from bamboo_cli.__main__ import main
main()
"""


STEPS = 120  # of a run that tells a step before its end: it does so after some seconds


class Frozen:
    """A run whose results lie on a disk of its own, to freeze."""

    def __init__(self, disk: Path, steps: int, *options: str, limit_s: float = LIMIT_S, place: str = ""):
        self.disk, self.results, self.log = disk, disk / "results", disk.parent / "log"
        job = ["run", "--model", "mlp", "--stages", "2", "--steps", str(steps), "--results", str(self.results)]
        command = [sys.executable, "-c", CODE, str(limit_s), place, str(disk), *job, *options]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def said(self) -> str:
        """All that the command has printed."""
        return self.log.read_text()

    def freeze_after(self, words: str) -> None:
        """Freezes the disk once the command has printed some words."""
        until_s = time.monotonic() + 60
        while words not in self.said:
            assert time.monotonic() < until_s, self.said
            time.sleep(0.05)
        call("fsfreeze", "-f", self.disk)

    def end(self, within_s: float) -> int:
        """Returns the exit code; the disk is frozen until then."""
        try:
            return self.process.wait(within_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"a frozen disk holds the launcher:\n{self.said}")
        finally:
            self.kill()

    def kill(self) -> None:
        """Thaws the disk and kills the command, as far as that is still to do."""
        with contextlib.suppress(subprocess.CalledProcessError):
            call("fsfreeze", "-u", self.disk)
        self.process.kill()
        self.process.wait(20)

    def report(self) -> str:
        """Returns the words of a report, once the processes that were left behind have ended."""
        for pid in map(int, re.findall(r"\(pid (\d+)\) (?:does|is)", self.said)):
            with contextlib.suppress(ProcessLookupError):
                assert is_readable(os.pidfd_open(pid), 20.0), "it ends with the thaw"
        command = [sys.executable, "-m", "bamboo_cli", "report", str(self.results / "latest")]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60).stdout


Launch = Callable[..., Frozen]


@pytest.fixture
def launch(disk: Path) -> Iterator[Launch]:
    """Returns a function that starts a run on the disk; no run outlives its test."""
    with contextlib.ExitStack() as stack:

        def start(steps: int, *options: str, limit_s: float = LIMIT_S, place: str = "") -> Frozen:
            run = Frozen(disk, steps, *options, limit_s=limit_s, place=place)
            stack.callback(run.kill)
            return run

        yield start


@pytest.mark.e2e
@pytest.mark.timeout(150)
def test_results_that_freeze_in_mid_run_end_the_run_in_time(launch: Launch) -> None:
    """The launcher waited in `write`, and then in `unlinkat` for the files of its store, until the thaw."""
    run = launch(100_000)
    run.freeze_after("\nstep ")
    assert run.end(LIMIT_S + ENDS_S) == ExitCode.STORAGE
    assert re.search(rf"bamboo: '{run.results}/\S+' has not answered for 2 s; ", run.said), run.said
    assert re.search(r"bamboo-scribe \(pid \d+\) survived SIGKILL: left behind; last committed step", run.said)
    assert "missing: the last records, trajectory.csv, the result in run.json, the seal" in run.said
    assert "The end of this run is not recorded" in run.report()
    history = read_history(run.results / "latest" / "events.jsonl")
    assert list(history.commits.steps) == list(range(len(history.commits)))


@pytest.mark.e2e
@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("place", "missing"),
    [
        pytest.param("session.ended", r"\d+ records?", marks=pytest.mark.soak),
        pytest.param("case_runner.summary_of", r"trajectory\.csv", marks=pytest.mark.soak),
    ],
)
def test_results_that_freeze_when_all_steps_are_committed_end_the_run_in_time(
    launch: Launch, place: str, missing: str
) -> None:
    """No signal ended it: two SIGINTs and SIGKILL did nothing until the thaw."""
    run = launch(3, place=place)
    assert run.end(60 + LIMIT_S + ENDS_S) == ExitCode.STORAGE
    assert re.search(rf"has not answered for 2 s; not written: {missing}", run.said)
    assert "failed: 3 steps in" in run.said
    report = run.report()
    assert "3 of 3 steps were committed" in report or "All 3 steps were committed" in report


@pytest.mark.e2e
@pytest.mark.timeout(150)
@pytest.mark.parametrize("place", [pytest.param("", marks=pytest.mark.soak), "session.ended"])
def test_two_signals_end_a_run_whose_results_are_frozen(launch: Launch, place: str) -> None:
    run = launch(3 if place else 100_000, limit_s=0.0, place=place)
    if place:
        until_s = time.monotonic() + 60
        while not _is_frozen(run):
            assert time.monotonic() < until_s, run.said
            time.sleep(0.05)
    else:
        run.freeze_after("\nstep ")
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    run.process.send_signal(signal.SIGINT)
    assert run.end(2.0 + 3.0) == ExitCode.INTERRUPTED  # promised in 2 s, and this machine may be busy
    assert "left behind" in run.said


def _is_frozen(run: Frozen) -> bool:
    """Whether the launcher waits for a scribe that waits for the disk."""
    children = Path(f"/proc/{run.process.pid}/task/{run.process.pid}/children").read_text().split()
    return any(map(_waits_for_disk, map(int, children)))


def _waits_for_disk(pid: int) -> bool:
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:  # it has ended since it was listed
        return False
    try:
        return process_state(pid, pidfd) == "D"
    finally:
        os.close(pidfd)


@pytest.mark.soak
@pytest.mark.e2e
@pytest.mark.timeout(150)
def test_a_freeze_that_passes_costs_no_worker(disk: Path, launch: Launch) -> None:
    """Neither was anyone put out before: the launcher stood still too. It no longer does."""
    run = launch(STEPS, limit_s=0.0)
    run.freeze_after("\nstep ")
    time.sleep(7.0)  # more than a worker may hang; etcd, whose disk it is too, takes little more
    call("fsfreeze", "-u", disk)
    assert run.process.wait(90) == 0, run.said
    history = read_history(run.results / "latest" / "events.jsonl")
    assert ([each.epoch for each in history.epochs], len(history.commits)) == ([1], STEPS)


@pytest.mark.e2e
@pytest.mark.timeout(60)
def test_a_place_of_checkpoints_that_is_frozen_before_the_start_is_named_in_one_line(disk: Path) -> None:
    call("fsfreeze", "-f", disk)
    command = [sys.executable, "-c", CODE, str(LIMIT_S), "", str(disk), "run", "--model", "mlp"]
    command += ["--results", str(disk.parent / "results"), "--checkpoints", str(disk / "kept")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LIMIT_S + 20)
    assert done.returncode == ExitCode.STORAGE
    (told,) = [each for each in done.stderr.splitlines() if each.startswith("bamboo:")]
    assert told.startswith(f"bamboo: '{disk / 'kept'}' has not answered for 2 s; bamboo-scribe (pid")
