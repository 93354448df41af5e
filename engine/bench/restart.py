"""The recovery benchmark beside its peers: torchrun's restart from a checkpoint, and torchft if it is installed.

The sides take turns. Training stalls for the time of the step of the kill, less a usual step. torchrun's workers run
the same training with the same partition, and save a checkpoint at every step. torchft trains three whole replicas of
the model. It discards the step of the kill, whereas bamboo redoes one stage of it, and goes on with fewer samples per
step. Its usual step is one after the kill, because such a step has as many replicas.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median

from engine.bench.figures import BenchRow, Cases, in_turns, paired_row, row
from engine.bench.recovery import STEP, only, pause_cases
from engine.bench.runs import run_bamboo, run_python
from engine.core.checks.recoveries import recoveries
from engine.core.errors import ensure, required
from engine.core.job.job import Job

_STALL_GOAL = 1 / 15
_METRIC = "training stalled s; peer: "


def recovery_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench recovery`; torchft is one of them if it is installed."""
    peers = {"torchrun": bench_restart} | ({"torchft": bench_torchft} if find_spec("torchft") else {})
    sizes = (2, 1) if quick else (Job().stages, 5)
    return {**pause_cases(quick), **{name: partial(peer, *sizes) for name, peer in peers.items()}}


def bench_restart(stages: int, num_pairs: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of the time that training stalled after a kill, beside torchrun's restart.

    Raises:
        WorkerFailedError: a run of either side did not recover.
    """
    job = Job(stages=stages, steps=STEP + 3, validate_every=0)
    sides: dict[str, Callable[[], tuple[float, float]]] = {
        "ours": lambda: (_killed_bamboo(job, folder), 1.0),
        "peer": partial(_restart_torchrun, job, folder),
    }
    ours, peer = in_turns(sides, num_pairs).values()
    (ours_s, _), (peer_s, attempts) = zip(*ours, strict=True), zip(*peer, strict=True)
    case = f"gpt, {job.stages} workers, one killed"
    return [
        paired_row(case, f"{_METRIC}torchrun", ours_s, peer_s, _STALL_GOAL),
        row(case, "attempts to go on; peer: torchrun's restarts", 1.0, median(attempts), num_pairs),
    ]


def bench_torchft(stages: int, num_pairs: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time that training stalled, beside the kill of a replica of torchft.

    Raises:
        WorkerFailedError: a run of either side did not recover.
    """
    job = Job(stages=stages, steps=STEP + 5, validate_every=0)
    sides = {"ours": lambda: _killed_bamboo(job, folder), "peer": lambda: _killed_torchft(job, folder)}
    ours, peer = in_turns(sides, num_pairs).values()
    return [paired_row(f"gpt, {job.stages} workers, one killed", f"{_METRIC}torchft", ours, peer)]


def _killed_bamboo(job: Job, folder: Path) -> float:
    """Returns the seconds that training stalled because of the kill."""
    flags = ["--stages", str(job.stages), "--steps", str(job.steps), "--validate-every", "0"]
    kill = ("--kill", f"{STEP}:{job.stages // 2}", "--no-twin")
    found = only(recoveries(run_bamboo(folder, *flags, *kill).history.records))
    return required(found.stall, "training stood").least_ns / 1e9


def _restart_torchrun(job: Job, folder: Path) -> tuple[float, float]:
    """Returns the seconds that torchrun's workers stalled because of the kill, and the number of their restarts."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stages}", "--max-restarts=9"]
        command += ["-m", "engine.bench.restart_peer", json.dumps(asdict(job)), str(STEP), temporary]
        # Without the variable, restarted workers read old keys of the store and fail.
        run = run_python(folder, command, TMPDIR=temporary, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    ends_ns = _ends_ns(run.stdout)
    restarts = max(int(each) for each in re.findall(r"restart=(\d+)", run.stdout))
    ensure(sorted(ends_ns) == list(range(job.steps)), f"torchrun lacks steps: {run.stdout}")
    ensure(restarts >= 1, f"torchrun did not restart: {run.stdout}")
    return _beyond_usual_s(ends_ns, lambda step: step < STEP), restarts


def _killed_torchft(job: Job, folder: Path) -> float:
    run = run_python(folder, ["-m", "engine.bench.torchft_peer", json.dumps(asdict(job)), str(STEP)])
    return _beyond_usual_s(_ends_ns(run.stdout), lambda step: step > STEP)


def _ends_ns(stdout: str) -> dict[int, int]:
    """Returns for each step the time at which its last worker ended it."""
    ends_ns: dict[int, int] = {}
    for step, at_ns in re.findall(r"step=(\d+) ended_ns=(\d+)", stdout):
        ends_ns[int(step)] = max(ends_ns.get(int(step), 0), int(at_ns))
    return ends_ns


def _beyond_usual_s(ends_ns: Mapping[int, int], is_usual: Callable[[int], bool]) -> float:
    took_ns = {later: ends_ns[later] - ends_ns[earlier] for earlier, later in pairwise(sorted(ends_ns))}
    return (took_ns[STEP] - median(took for step, took in took_ns.items() if is_usual(step))) / 1e9
