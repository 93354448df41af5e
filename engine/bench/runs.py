"""Benchmarks of whole runs in child processes: the launch beside torchrun's, and the cost of the audit.

The runs of both sides take turns. They read neither the user's job files nor the variables ``BAMBOO_*``.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median

from engine.bench.figures import BenchRow, Cases, in_turns, paired_row
from engine.core.errors import WorkerFailedError, ensure
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, CommitRecord
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.runtime.process import subprocesses

_LAUNCH_GOAL = 1 / 3
_AUDIT_GOAL = 1.02
_AUDIT_CASE = "gpt, --audit 1 beside --audit 0"
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120.0
_GRACE_S = 10.0


def launch_cases(quick: bool) -> Cases:
    """Returns the only case of `bamboo bench launch`."""
    job = Job(stages=2) if quick else Job()
    case = f"gpt, {job.stages} workers"
    return {case: partial(_bench_launch, case, job, 1 if quick else 7)}


def _bench_launch(case: str, job: Job, num_pairs: int, folder: Path) -> list[BenchRow]:
    sides = {"ours": partial(_launch_ours, job, folder), "peer": partial(_launch_torchrun, job, folder)}
    ours, peer = in_turns(sides, num_pairs).values()
    return [paired_row(case, "command to first step s", ours, peer, _LAUNCH_GOAL)]


def audit_cases(quick: bool) -> Cases:
    """Returns the only case of `bamboo bench audit`."""
    return {_AUDIT_CASE: partial(_bench_audit, *((1, 4) if quick else (5, 80)))}


def _bench_audit(num_pairs: int, num_steps: int, folder: Path) -> list[BenchRow]:
    def seconds(audit: str) -> float:
        return seconds_between_commits(run_bamboo(folder, "--audit", audit, "--steps", str(num_steps)))

    ours, peer = in_turns({audit: partial(seconds, audit) for audit in ("1", "0")}, num_pairs).values()
    return [paired_row(_AUDIT_CASE, "time between commits s", ours, peer, _AUDIT_GOAL)]


@dataclass(frozen=True, slots=True)
class BenchRun:
    """A child that has ended: the time of its start, its stdout, and its history, empty unless it ran bamboo."""

    started_ns: int
    stdout: str
    history: RunHistory


def _launch_ours(job: Job, folder: Path) -> float:
    run = run_bamboo(folder, "--stages", str(job.stages), "--steps", "1")
    ends_ns = [each.end_ns for each in run.history.of(ActionRecord) if each.action.endswith("STEP")]
    return (max(ends_ns) - run.started_ns) / 1e9


def _launch_torchrun(job: Job, folder: Path) -> float:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stages}"]
    command += ["-m", "engine.bench.torchrun_peer", json.dumps(asdict(job))]
    # torchrun leaves its temporary files behind.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        run = run_python(folder, command, TMPDIR=temporary)
    ends_ns = [int(each) for each in re.findall(r"finished_ns=(\d+)", run.stdout)]
    ensure(len(ends_ns) == job.stages, f"a worker of torchrun did not finish: {run.stdout}")
    return (max(ends_ns) - run.started_ns) / 1e9


def seconds_between_commits(run: BenchRun) -> float:
    """Returns the median seconds of a step, from one commit to the next."""
    commits_ns = [each.at_ns for each in run.history.of(CommitRecord)]
    return median(later - earlier for earlier, later in pairwise(commits_ns)) / 1e9


def run_bamboo(folder: Path, *flags: str, **variables: str) -> BenchRun:
    """Runs `bamboo run` in `folder` with `flags` and environment `variables`; deletes its run folder afterwards.

    Raises:
        WorkerFailedError: the run failed.
    """
    with tempfile.TemporaryDirectory(dir=folder) as results:
        run = run_python(folder, ["-m", "bamboo_cli", "run", "--json", "--results", results, *flags], **variables)
        return BenchRun(run.started_ns, run.stdout, _history_of(json.loads(run.stdout)["run_dir"]))


def run_scenario(folder: Path, file: Path) -> RunHistory:
    """Returns the history of a run with the faults of a scenario file, which has no expectations.

    Raises:
        WorkerFailedError: the run failed, or a fault did not strike.
    """
    with tempfile.TemporaryDirectory(dir=folder) as results:
        arguments = ["-m", "bamboo_cli", "inject", "--scenario", str(file), "--json", "--results", results]
        (run,) = json.loads(run_python(folder, arguments).stdout)["runs"]
        return _history_of(run["run_dir"])


def _history_of(run_dir: str) -> RunHistory:
    return read_history(Path(run_dir) / "events.jsonl", every_action=True)


def run_python(folder: Path, arguments: list[str], **variables: str) -> BenchRun:
    """Runs Python with `arguments` in `folder`, which has no job file; adds `variables` to the environment.

    Raises:
        WorkerFailedError: the process failed; its stderr is in the message.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BAMBOO_")}
    environment |= {"PYTHONPATH": subprocesses.python_path(), "XDG_CONFIG_HOME": str(folder), **variables}
    command = [sys.executable, *arguments]
    started_ns = time.monotonic_ns()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            # On SIGTERM it ends its own children too; after SIGKILL they would go on.
            child.terminate()
            child.wait(_GRACE_S)
            raise
    if child.returncode != 0:
        raise WorkerFailedError(f"{' '.join(arguments[:3])} exited with code {child.returncode}:\n{stderr}")
    return BenchRun(started_ns, stdout, RunHistory())
