"""Benchmarks of whole runs in child processes: the launch beside torchrun's and transformers', the cost of the audit.

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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from engine.bench import transformers_peer
from engine.bench.figures import BenchRow, Cases, in_turns, overhead_rows, paired_row
from engine.core.errors import WorkerFailedError, ensure
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import ActionRecord, CommitRecord
from engine.core.job.job import Job
from engine.core.ownership import Redundancy
from engine.core.program.passes import overhead_floor
from engine.core.texts import counted
from engine.files.atomic_write import write_atomically
from engine.files.events_file import read_history
from engine.runtime.process import subprocesses

_LAUNCH_GOAL = 1 / 3
_START_GOAL = 1.5
_MICROBATCHES, _ROWS = 2, 4  # of the step of a model of transformers
_AUDIT_GOAL = 1.02
_AUDIT_CASE = "gpt, --audit 1 beside --audit 0"
_ROOT = Path(__file__).parents[2]
_TIMEOUT_S = 120.0
_GRACE_S = 10.0
_LOOK_S = 1.0

T = TypeVar("T")


def launch_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench launch`: a built-in model, and small and usual ones of transformers."""
    job = Job(stages=2) if quick else Job()
    case = f"gpt, {job.stages} workers"
    cases = {case: partial(_bench_launch, case, job, 1 if quick else 7)}
    for width, size in ((64, "4 M"), (256, "23 M"), (768, "124 M")):
        for stages in (1, 2):
            case = f"--hf, GPT-2 of {size}, {counted(stages, 'worker')}"
            cases[case] = partial(_bench_start, case, width, stages, 1 if quick else 5)
    return cases


def _bench_launch(case: str, job: Job, num_pairs: int, folder: Path) -> list[BenchRow]:
    sides = {"ours": partial(_launch_ours, job, folder), "peer": partial(_launch_torchrun, job, folder)}
    ours, peer = in_turns(sides, num_pairs).values()
    return [paired_row(case, "command to first step s", ours, peer, _LAUNCH_GOAL)]


def _bench_start(case: str, width: int, stages: int, num_pairs: int, folder: Path) -> list[BenchRow]:
    with tempfile.TemporaryDirectory(dir=folder) as model:
        run_python(folder, ["-m", transformers_peer.__name__, "make", model, str(width)])
        step = ("--microbatches", str(_MICROBATCHES), "--set", f"microbatch_size={_ROWS}", "--steps", "1")
        flags = ("--hf", model, "--data", f"{model}/{transformers_peer.TEXT}", "--stages", str(stages), *step)
        script = ["-m", transformers_peer.__name__, "train", model, str(_MICROBATCHES * _ROWS)]

        def our_s() -> float:
            return _first_step_s(run_bamboo(folder, *flags))

        sides: dict[str, Callable[[], float]] = {"ours": our_s, "peer": partial(_script_s, folder, script)}
        ours, peer = in_turns(sides, num_pairs).values()
    return [paired_row(case, "command to first step s", ours, peer, _START_GOAL)]


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
    """A finished child: the time of its start, its stdout, and its history, empty unless it ran bamboo."""

    started_ns: int
    stdout: str
    history: RunHistory


def _launch_ours(job: Job, folder: Path) -> float:
    return _first_step_s(run_bamboo(folder, "--stages", str(job.stages), "--steps", "1"))


def _first_step_s(run: BenchRun) -> float:
    ends_ns = [action.end_ns for action in run.history.of(ActionRecord) if action.action.endswith("STEP")]
    return (max(ends_ns) - run.started_ns) / 1e9


def _launch_torchrun(job: Job, folder: Path) -> float:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stages}"]
    command += ["-m", "engine.bench.torch_side", json.dumps(asdict(replace(job, steps=1)))]
    # torchrun leaves its temporary files behind.
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        return _script_s(folder, command, job.stages, TMPDIR=temporary)


def _script_s(folder: Path, command: list[str], workers: int = 1, **variables: str) -> float:
    """Returns the seconds until the last worker of a peer says that it has ended its step."""
    run = run_python(folder, command, **variables)
    ends_ns = [int(at_ns) for at_ns in re.findall(r"ended_ns=(\d+)", run.stdout)]
    ensure(len(ends_ns) == workers, f"a worker of {command[1]} did not finish: {run.stdout}")
    return (max(ends_ns) - run.started_ns) / 1e9


def seconds_between_commits(run: BenchRun) -> float:
    """Returns the median seconds of a step, from one commit to the next."""
    commits_ns = [commit.at_ns for commit in run.history.of(CommitRecord)]
    return median(later - earlier for earlier, later in pairwise(commits_ns)) / 1e9


def run_bamboo(folder: Path, *flags: str, **variables: str) -> BenchRun:
    """Runs `bamboo run` in `folder` and deletes its run folder; raises WorkerFailedError if the run failed."""
    with tempfile.TemporaryDirectory(dir=folder) as results:
        run = run_python(folder, ["-m", "bamboo_cli", "run", "--json", "--results", results, *flags], **variables)
        return BenchRun(run.started_ns, run.stdout, _history_of(json.loads(run.stdout)["run_dir"]))


def watched_bamboo(folder: Path, look: Callable[[int, RunHistory], T | None], *flags: str) -> T:
    """Runs `bamboo run` until `look` returns something; raises WorkerFailedError if it ends before, or in 2 minutes."""
    with tempfile.TemporaryDirectory(dir=folder) as results:
        command = [sys.executable, "-m", "bamboo_cli", "run", "--json", "--results", results, *flags]
        with subprocess.Popen(
            command, cwd=folder, env=_environment(folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        ) as child:
            try:
                until_s = time.monotonic() + _TIMEOUT_S
                while child.poll() is None and time.monotonic() < until_s:
                    time.sleep(_LOOK_S)
                    for events in Path(results).glob("*/events.jsonl"):
                        if (figures := look(child.pid, read_history(events, every_action=False))) is not None:
                            return figures
            finally:
                child.terminate()
    raise WorkerFailedError(f"bamboo run {' '.join(flags)} ended, or did not come to what is measured")


def run_with_fault(folder: Path, job: Mapping[str, Any], fault: Mapping[str, Any]) -> RunHistory:
    """Returns the history of a run with a fault; raises WorkerFailedError if it failed or the fault did not strike."""
    scenario = {"version": 1, "name": "bench", "about": "one worker leaves", "job": job, "faults": [fault]}
    with tempfile.TemporaryDirectory(dir=folder) as results:
        file = Path(results) / "scenario.yaml"
        write_atomically(file, json.dumps(scenario))
        arguments = ["-m", "bamboo_cli", "inject", "--scenario", str(file), "--json", "--results", results]
        (run,) = json.loads(run_python(folder, arguments).stdout)["runs"]
        return _history_of(run["run_dir"])


def job_fields(job: Job) -> dict[str, Any]:
    """Returns the fields of a job file, without the results folder and the name."""
    return {name: value for name, value in asdict(job).items() if name not in ("results", "name")}


def _history_of(run_dir: str) -> RunHistory:
    return read_history(Path(run_dir) / "events.jsonl", every_action=True)


def run_python(folder: Path, arguments: list[str], **variables: str) -> BenchRun:
    """Runs Python in `folder` with more environment `variables`; raises WorkerFailedError with its stderr."""
    environment = _environment(folder) | variables
    command = [sys.executable, *arguments]
    started_ns = time.monotonic_ns()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        try:
            stdout, stderr = child.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            # On SIGTERM it ends its own children too; after SIGKILL they would continue.
            child.terminate()
            child.wait(_GRACE_S)
            raise
    if child.returncode != 0:
        raise WorkerFailedError(f"{' '.join(arguments[:3])} exited with code {child.returncode}:\n{stderr}")
    return BenchRun(started_ns, stdout, RunHistory())


def _environment(folder: Path) -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("BAMBOO_")}
    return environment | {"PYTHONPATH": subprocesses.python_path(), "XDG_CONFIG_HOME": str(folder)}


def flags(job: Job) -> list[str]:
    """Returns the settings of `bamboo run` for a job: fields that are not their defaults, or whose default depends."""
    plain, usual = asdict(job), asdict(Job()) | {"elastic": None}
    settings = []
    for name, value in plain.items():
        if isinstance(value, dict):
            settings += [f"{name}.{key}={json.dumps(part)}" for key, part in value.items()]
        elif value != usual[name]:
            settings.append(f"{name}={value if isinstance(value, str) else json.dumps(value)}")
    return [part for setting in settings for part in ("--set", setting)]


def timed_flags(job: Job) -> list[str]:
    """Returns the same for a job without audit, validation and checkpoints."""
    return flags(replace(job, audit=0, validate_every=0, checkpoint_every="0"))


# The redundancy benchmark: step time and memory of whole runs with each redundancy, and with streams, in turns.
#
# Time is measured on stages that sleep: with more workers than cores, real compute would fill the bubbles in which
# redundant forwards run. Memory is measured on a real model.

_LAZY_GOAL = 0.01
_EAGER_GOAL_OVER_FLOOR = 0.02
MEMORY_CASE = "memory gpt P=4 M=8"
_GIVING_BACK = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # bytes; fixed, because glibc else raises it to the freed sizes
_MODES: tuple[Redundancy, ...] = ("none", "lazy", "eager")
_STREAMED = "lazy, log_every 1"
_IN_TIME: dict[str, dict[str, Any]] = {
    **{mode: {"redundancy": mode} for mode in _MODES},
    _STREAMED: {"redundancy": "lazy", "log_every": 1},
}
_SHAPES = ((4, 8), (12, 32))  # P, M
_FORWARD_MS, _BACKWARD_MS = 10, 20
_WIDTH = 256  # of the timed layers and of the data, so that no layer has to widen its input


def overhead_jobs() -> dict[str, Job]:
    """Returns the jobs of the timed cases by their names."""
    return {
        f"timed P={stages} M={microbatches}": Job(
            model="timed",
            model_args={"layers": stages, "forward_ms": _FORWARD_MS, "backward_ms": _BACKWARD_MS, "width": _WIDTH},
            data_args={"features": _WIDTH},
            stages=stages,
            microbatches=microbatches,
        )
        for stages, microbatches in _SHAPES
    }


def redundancy_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench redundancy`."""
    sizes = (1, 4) if quick else (5, 12)
    timed: Cases = {name: partial(bench_overhead, name, job, *sizes) for name, job in overhead_jobs().items()}
    return {**timed, MEMORY_CASE: partial(bench_memory, 1 if quick else 3, quick)}


def bench_overhead(case: str, job: Job, num_rounds: int, num_steps: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of a case's step time per redundancy, and with streams; raises WorkerFailedError."""

    def measured(mode: str) -> float:
        run = run_bamboo(folder, *timed_flags(replace(job, **_IN_TIME[mode], steps=num_steps)))
        return seconds_between_commits(run)

    seconds = in_turns({mode: partial(measured, mode) for mode in _IN_TIME}, num_rounds)
    floor = overhead_floor(job.stages, job.microbatches, _FORWARD_MS, _BACKWARD_MS)
    goals = {"lazy": (0.0, _LAZY_GOAL), _STREAMED: (0.0, None), "eager": (floor, floor + _EAGER_GOAL_OVER_FLOOR)}
    rows = []
    for mode, goal in goals.items():
        rows += overhead_rows(f"{mode} {case}", seconds[mode], seconds["none"], *goal)
    return rows


def bench_memory(num_rounds: int, quick: bool, folder: Path) -> list[BenchRow]:
    """Returns the rows of the peak memory of all workers with each redundancy beside none.

    The first measurement uses the C allocator's defaults, which keep much freed memory; the second returns every freed
    block of 128 KiB or more. Raises WorkerFailedError if a run failed.
    """
    width, depth = (64, 4) if quick else (512, 8)
    job = Job(model="gpt", model_args={"width": width, "depth": depth}, steps=3)
    rows = []
    for allocator, variables in (("", {}), (", freed blocks given back", _GIVING_BACK)):
        sides = {mode: partial(_measured_mib, job, mode, folder, variables) for mode in _MODES}
        results = in_turns(sides, num_rounds)
        metric = "peak memory of all MiB, beside none"
        rows += [
            paired_row(f"{mode} {MEMORY_CASE}{allocator}", metric, results[mode], results["none"])
            for mode in _MODES[1:]
        ]
    return rows


def _measured_mib(job: Job, mode: Redundancy, folder: Path, variables: Mapping[str, str]) -> float:
    run = run_bamboo(folder, *timed_flags(replace(job, redundancy=mode)), **variables)
    return float(sum(json.loads(run.stdout)["peak_memory_mib"].values()))
