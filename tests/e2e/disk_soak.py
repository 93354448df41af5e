"""``python -m tests.e2e.disk_soak``: runs on disks that fill up, or with files that may not grow, at some forty places.

A disk is a tmpfs of a few kilobytes, so that another write of the run is the first to fail in each. A file may not grow
beyond a limit, as under a quota. A run must end with 0, or with 74, its last committed step and a result. All that it
says must be right: the committed steps, and the hash of their trajectory. Its folder must stay readable, and nothing
may be left behind. Mounting a tmpfs needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.core.checks.trajectory import TrajectoryRow, trajectory_hash
from engine.core.errors import ExitCode, StorageError
from engine.files.events_file import read_history
from engine.files.trajectory_file import trajectory_rows
from engine.report.load import load
from engine.runtime.store.embedded_etcd import find_etcd
from tests.e2e.launcher import Launcher

STEPS = 12
_JOB = "model: mlp, stages: 2, steps: 12, microbatches: 2, microbatch_size: 4, validate_every: 0"
_RUN = ("run", "--json", "--model", "mlp", "--stages", "2", "--steps", str(STEPS), "--microbatches", "2")
_SIZES = ("--microbatch-size", "4", "--validate-every", "0")
_KILLED = (*_RUN, *_SIZES, "--kill", "4:1")
_SCENARIO = f"""\
version: 1
name: killed
about: a kill, a recovery and a twin
job: {{{_JOB}}}
faults: [{{at: {{step: 4, stage: 1}}, do: kill}}]
expect: {{outcome: recovered, trajectory: identical, culprit: exact, leftovers: none}}
"""
_FILES = {"killed.yaml": _SCENARIO}
_UNLIMITED = 0


class Place(NamedTuple):
    """A command on a disk of `disk_kib`, or with files of at most `file_bytes`; its store is private, or a kept one."""

    arguments: tuple[str, ...]
    disk_kib: int = _UNLIMITED
    file_bytes: int = _UNLIMITED
    is_private: bool = False


_PLAIN = (*_RUN, *_SIZES)
_INJECT = ("inject", "--json", "--scenario", "killed.yaml")
PLACES = {
    **{f"run, a disk of {size} KiB": Place(_PLAIN, size) for size in (4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64)},
    **{f"kill, a disk of {size} KiB": Place(_KILLED, size) for size in (12, 16, 24, 32, 40, 48, 56, 64, 80, 96, 128)},
    **{f"inject, a disk of {size} KiB": Place(_INJECT, size) for size in (8, 24, 48, 72, 112)},
    **{
        f"kill, files of {size} bytes": Place(_KILLED, file_bytes=size)
        for size in (1_000, 3_000, 4_500, 6_000, 8_000, 10_000, 12_000, 20_000)
    },
    **{f"run, a store on a disk of {size} KiB": Place(_PLAIN, size, is_private=True) for size in (600, 40_000, 66_000)},
}


class Verdict(NamedTuple):
    """The exit code of a command, its committed steps, and all deviations from the rules."""

    code: int
    steps: int
    problems: tuple[str, ...]


@contextlib.contextmanager
def kept_store(folder: Path) -> Iterator[str]:
    """Runs an etcd on a port of loopback; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = (f"--listen-client-urls=http://{address}", f"--advertise-client-urls=http://{address}")
    peer = ("--listen-peer-urls=unix://peer:0", "--unsafe-no-fsync", "--log-level=error")
    folder.mkdir()
    with subprocess.Popen([find_etcd(), *flags, *peer], cwd=folder, stderr=subprocess.DEVNULL) as server:
        try:
            yield address
        finally:
            server.kill()


@contextlib.contextmanager
def small_disk(at: Path, kib: int) -> Iterator[None]:
    """Mounts a tmpfs of some KiB; 0 stands for no limit."""
    at.mkdir()
    if kib:
        subprocess.run(["/bin/mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", at], check=True)
    try:
        yield
    finally:
        if kib:
            subprocess.run(["/bin/umount", at], check=True)


def whole_run(folder: Path, store: str) -> list[TrajectoryRow]:
    """Returns the trajectory of a run whose writes do not fail."""
    launcher = Launcher(folder, (*_PLAIN, "--etcd", store), {})
    assert launcher.wait().code == 0, launcher.stderr()
    return trajectory_rows((launcher.run_folder / "trajectory.csv").read_text(), Path("trajectory.csv"))


def fail_at(place: Place, folder: Path, store: str, whole: Sequence[TrajectoryRow]) -> Verdict:
    """Runs the command of a place in `folder`, and judges its end by the `whole` trajectory."""
    disk = folder / "disk"
    folder.mkdir()
    options = ("--results", str(disk / "results"), *(() if place.is_private else ("--etcd", store)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with small_disk(disk, place.disk_kib):
        resource.setrlimit(resource.RLIMIT_FSIZE, (place.file_bytes or before[0], before[1]))
        try:
            launcher = Launcher(folder / "launch", (*place.arguments, *options), {}, files=_FILES)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        try:
            done = launcher.wait(90)
            left = launcher.leftovers()
        finally:
            launcher.kill_all()
        problems = [f"left behind: {left}"] if left else []
        problems += [] if done.code in (0, ExitCode.STORAGE) else [f"exit code {done.code}: {done.stderr[-500:]}"]
        problems += ["a traceback"] if "Traceback" in done.stderr else []
        steps = 0
        try:
            (told,) = [json.loads(line) for line in done.stdout.splitlines()] or [{}]
        except ValueError:
            told, problems = {}, [*problems, f"stdout {done.stdout!r}"]
        if place.arguments[0] == "run" and told.get("outcome") != "refused":
            steps, problems = told.get("steps", -1), [*problems, *_wrong_result(told, done.code, whole)]
        problems += _unreadable(disk / "results", steps)
    return Verdict(done.code, steps, tuple(problems))


def _wrong_result(told: dict[str, Any], code: int, whole: Sequence[TrajectoryRow]) -> Iterator[str]:
    """Yields the mistakes of a result: its steps, its trajectory, its error."""
    if "steps" not in told:
        yield f"no result: {told}"
        return
    if told["exit_code"] != code:
        yield f"ended with {code} and told {told['exit_code']}"
    if not code and told["steps"] != STEPS:
        yield f"ended with 0 after {told['steps']} steps"
    if code and "cannot write" not in told["error"] and "No space" not in told["error"]:
        yield f"the error does not name the file: {told['error']}"
    # The hashes of the last committed step may be on their way when the run ends.
    ends = (told["steps"], told["steps"] - 1) if code else (STEPS,)
    right = {trajectory_hash(row for row in whole if row.step < end) for end in ends}
    if told["trajectory"] is not None and told["trajectory"] not in right:
        yield f"another trajectory after {told['steps']} steps"


def _unreadable(results: Path, steps: int) -> Iterator[str]:
    """Yields the mistakes of the run folders: they must be readable, and tell no more steps than were committed."""
    for events in results.glob("2*/events.jsonl"):
        try:
            run = load(read_history(events))
        except StorageError as error:
            if events.stat().st_size:
                yield f"unreadable: {error}"
        else:
            if steps and len(run.steps) > steps:
                yield f"{len(run.steps)} steps in the folder, {steps} told"


def main() -> int:
    """Runs all places; returns 1 if any broke a rule."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a part of the names of places")
    only = parser.parse_args().only
    places = {name: place for name, place in PLACES.items() if only in name}
    bad = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with kept_store(folder / "store") as store:
            whole = whole_run(folder / "whole", store)
            for number, (name, place) in enumerate(places.items()):
                verdict = fail_at(place, folder / str(number), store, whole)
                bad += bool(verdict.problems)
                told = "; ".join(verdict.problems) or "as promised"
                print(f"{name}: exit {verdict.code}, {verdict.steps} steps, {told}", flush=True)
    print(f"{len(places)} places, {bad} broke a rule")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
