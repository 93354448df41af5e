"""Benchmarks of whole runs, each a process of its own: the launch beside torchrun's, and what the audit costs.

The runs of both sides take turns. They see no job file of the user's, and none of the variables that describe a job.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from engine.bench.figures.rows import AUDIT_GOAL, LAUNCH_GOAL, Row, paired_row
from engine.core.config.job import Job
from engine.core.errors import WorkerFailedError

_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120.0
_GRACE_S = 10.0


def bench_launch(num_pairs: int, folder: Path) -> list[Row]:
    """Measures from the command to the end of the first optimizer step, against torchrun with the same model.

    Raises:
        WorkerFailedError: a run of either side failed.
    """
    ours, peer = in_turns(lambda: _launch_ours(folder), lambda: _launch_torchrun(folder), num_pairs)
    return [paired_row(f"gpt, {Job().stages} workers", "command to first step s", ours, peer, LAUNCH_GOAL)]


def bench_audit(num_pairs: int, num_steps: int, folder: Path) -> list[Row]:
    """Measures the time between commits with an audit of every step, against that without any.

    Raises:
        WorkerFailedError: a run failed.
    """
    flags = ("--steps", str(num_steps))
    ours, peer = in_turns(
        lambda: seconds_between_commits(run_bamboo(folder, "--audit", "1", *flags)),
        lambda: seconds_between_commits(run_bamboo(folder, "--audit", "0", *flags)),
        num_pairs,
    )
    return [paired_row("gpt, --audit 1 beside --audit 0", "time between commits s", ours, peer, AUDIT_GOAL)]


def in_turns(ours: Callable[[], float], peer: Callable[[], float], num_pairs: int) -> tuple[list[float], list[float]]:
    """Returns the figures of both sides, pair by pair; every other pair begins with the peer."""
    figures: tuple[list[float], list[float]] = ([], [])
    for pair in range(num_pairs):
        for side in (0, 1) if pair % 2 == 0 else (1, 0):
            figures[side].append((ours, peer)[side]())
    return figures


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one child: when it was started, what it wrote to stdout, and its events if it was ours."""

    started_ns: int
    stdout: str
    events: list[dict[str, Any]]


def _launch_ours(folder: Path) -> float:
    run = run_bamboo(folder, "--steps", "1")
    ends_ns = [each["end_ns"] for each in run.events if each["event"] == "action" and each["action"].endswith("STEP")]
    return (max(ends_ns) - run.started_ns) / 1e9


def _launch_torchrun(folder: Path) -> float:
    job = Job()
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stages}"]
    command += ["-m", "engine.bench.peers.torchrun_peer", json.dumps(asdict(job))]
    # torchrun leaves its temporary files behind.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        run = run_python(folder, command, TMPDIR=temporary)
    ends_ns = [int(each) for each in re.findall(r"finished_ns=(\d+)", run.stdout)]
    assert len(ends_ns) == job.stages, run.stdout
    return (max(ends_ns) - run.started_ns) / 1e9


def seconds_between_commits(run: Run) -> float:
    """Returns the median time of a step, from one commit to the next."""
    commits_ns = [each["at_ns"] for each in run.events if each["event"] == "commit"]
    return median(later - earlier for earlier, later in pairwise(commits_ns)) / 1e9


def run_bamboo(folder: Path, *flags: str, **variables: str) -> Run:
    """Runs `bamboo run` with some arguments in `folder` and returns what it wrote; its run folder is gone then.

    `variables` are set in its environment.

    Raises:
        WorkerFailedError: it failed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as results:
        run = run_python(folder, ["-m", "bamboo_cli", "run", "--json", "--results", results, *flags], **variables)
        return Run(run.started_ns, run.stdout, _events_of(json.loads(run.stdout)["run_dir"]))


def run_scenario(folder: Path, file: Path) -> list[dict[str, Any]]:
    """Runs the faults of a scenario file that expects nothing, in `folder`; returns the events of its run.

    Raises:
        WorkerFailedError: it failed, or a fault did not strike.
    """
    with tempfile.TemporaryDirectory(dir=folder) as results:
        arguments = ["-m", "bamboo_cli", "inject", "--scenario", str(file), "--json", "--results", results]
        (run,) = json.loads(run_python(folder, arguments).stdout)["runs"]
        return _events_of(run["run_dir"])


def _events_of(run_dir: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run_dir) / "events.jsonl").read_text().splitlines()]


def run_python(folder: Path, arguments: list[str], **variables: str) -> Run:
    """Runs Python with some arguments, and variables beside the user's, in `folder`, where no job file lies.

    Raises:
        WorkerFailedError: it failed; its last words are in the message.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BAMBOO_")}
    environment |= {"PYTHONPATH": str(_ROOT), "XDG_CONFIG_HOME": str(folder), **variables}
    command = [sys.executable, *arguments]
    started_ns = time.monotonic_ns()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            # Asked to end it takes its own children along, as a kill would not.
            child.terminate()
            child.wait(_GRACE_S)
            raise
    if child.returncode != 0:
        raise WorkerFailedError(f"{' '.join(arguments[:3])} exited with code {child.returncode}:\n{stderr}")
    return Run(started_ns, stdout, [])
