"""The recovery benchmark beside its peers: torchrun's restart from a checkpoint, and torchft if it is installed.

The sides take turns. The time that a kill adds is the time of its step minus the time of a usual step. Our pause is
compared with that time of torchrun too: after it training goes on, but slower until the step is committed. torchrun's
workers run the same training with the same partition, and save a checkpoint at every step. torchft trains three whole
replicas of the model. It discards the step of the kill, whereas bamboo redoes one stage of it, and goes on with fewer
samples per step. Its usual step is one after the kill, because such a step has as many replicas.
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
from statistics import mean, median

from engine.bench.figures.rows import BenchRow, Cases, in_turns, paired_row, ratio_row, row
from engine.bench.recovery import STEP, only, pause_cases
from engine.bench.runs import run_bamboo, run_python
from engine.core.checks.recovery_log import recoveries
from engine.core.config.job import Job

_PAUSE_GOAL = 1 / 35
_EXTRA_GOAL = 1 / 15
_METRIC = "time beyond a usual step s; peer: "


def recovery_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench recovery`; torchft is one of them if it is installed."""
    peers = {"torchrun": bench_restart} | ({"torchft": bench_torchft} if find_spec("torchft") else {})
    return {**pause_cases(quick), **{name: partial(peer, 1 if quick else 5) for name, peer in peers.items()}}


def bench_restart(num_pairs: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of our pause, and of the time that a kill adds to its step, beside torchrun's restart.

    Raises:
        WorkerFailedError: a run of either side did not recover.
    """
    job = Job(steps=STEP + 3, validate_every=0)
    sides = {"ours": partial(_killed_bamboo, job, folder), "peer": partial(_restart_torchrun, job, folder)}
    ours, peer = in_turns(sides, num_pairs).values()
    (extra_s, pauses_s), (peer_s, attempts) = zip(*ours, strict=True), zip(*peer, strict=True)
    case = f"gpt, {job.stages} workers, one killed"
    return [
        ratio_row(case, "pause s, mean; peer: torchrun", mean(pauses_s), mean(peer_s), num_pairs, _PAUSE_GOAL),
        paired_row(case, f"{_METRIC}torchrun", extra_s, peer_s, _EXTRA_GOAL),
        row(case, "attempts to go on; peer: torchrun's restarts", 1.0, median(attempts), num_pairs),
    ]


def bench_torchft(num_pairs: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time that a kill adds to its step, beside the kill of a replica of torchft.

    Raises:
        WorkerFailedError: a run of either side did not recover.
    """
    job = Job(steps=STEP + 5, validate_every=0)
    sides = {"ours": lambda: _killed_bamboo(job, folder)[0], "peer": lambda: _killed_torchft(job, folder)}
    ours, peer = in_turns(sides, num_pairs).values()
    return [paired_row(f"gpt, {job.stages} workers, one killed", f"{_METRIC}torchft", ours, peer)]


def _killed_bamboo(job: Job, folder: Path) -> tuple[float, float]:
    """Returns the seconds that the kill added to its step, and the seconds of the pause."""
    flags = ("--steps", str(job.steps), "--validate-every", "0", "--kill", f"{STEP}:2", "--no-twin")
    found = only(recoveries(run_bamboo(folder, *flags).history.records))
    assert found.gap_ns is not None and found.pause_ns is not None
    return found.gap_ns / 1e9, found.pause_ns / 1e9


def _restart_torchrun(job: Job, folder: Path) -> tuple[float, float]:
    """Returns the seconds that the kill added to the step of torchrun's workers, and the number of their restarts."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.stages}", "--max-restarts=9"]
        command += ["-m", "engine.bench.peers.restart_peer", json.dumps(asdict(job)), str(STEP), temporary]
        # Without the variable, restarted workers read old keys of the store and fail.
        run = run_python(folder, command, TMPDIR=temporary, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")
    ends_ns = _ends_ns(run.stdout)
    restarts = max(int(each) for each in re.findall(r"restart=(\d+)", run.stdout))
    assert sorted(ends_ns) == list(range(job.steps)) and restarts >= 1, run.stdout
    return _beyond_usual_s(ends_ns, lambda step: step < STEP), restarts


def _killed_torchft(job: Job, folder: Path) -> float:
    run = run_python(folder, ["-m", "engine.bench.peers.torchft_peer", json.dumps(asdict(job)), str(STEP)])
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
