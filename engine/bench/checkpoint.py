"""The checkpoint benchmark: the cost of checkpoints to a step, in parts, beside torch's asynchronous save.

Whole runs take turns: with a checkpoint of every step, of every hundredth, and without one. Timed stages leave the
processor to the checkpoints, as a device would. After the loss of a state, the time until the next commit counts.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from torch import Tensor, nn

from engine.bench.async_save_peer import demo_replicas
from engine.bench.figures import BenchRow, Cases, in_turns, paired_row, ratio_row, row
from engine.bench.runs import BenchRun, run_bamboo, run_python
from engine.core.checkpoint_rules import StateShare
from engine.core.history.run_records import CommitRecord, FaultRecord, KeptRecord
from engine.core.protocol.worker_state import Keep
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss
from engine.models.networks import Timed
from engine.runtime.checkpoint.writer import CheckpointWriter

_GOALS = {"gpt": 1.035, "timed": 1.01}
_RARE_GOAL = 1.003
_BACK_GOAL = 1.5  # seconds
_LOST_STEP = 6
_WIDTH = 32  # of the synthetic vectors
_BALLAST = 216_000  # parameters of a timed layer: four have the state of the demo


class Ballasted(Timed):
    """A timed layer that trains many parameters."""

    def __init__(self) -> None:
        super().__init__(_WIDTH, 0.010, 0.020)
        self.ballast = nn.Parameter(torch.zeros(_BALLAST))

    def forward(self, x: Tensor) -> Tensor:
        """Returns float32 [size, width]."""
        return super().forward(x) + self.ballast.mean()


def ballasted() -> Model:
    """Returns a model of four timed layers."""
    layers = (LayerSpec(f"timed{index}", "Ballasted", Ballasted) for index in range(4))
    return Model(tuple(layers), default_loss, check_pure=False)


def checkpoint_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench checkpoint`."""
    sizes = (1, 12) if quick else (5, 101)
    jobs: Mapping[str, tuple[str, ...]] = {
        "gpt": (),
        "timed": ("--model", f"{__name__}:ballasted", "--data", "synthetic", "--microbatches", "8"),
    }
    of_steps: Cases = {name: partial(_bench_steps, name, flags, *sizes) for name, flags in jobs.items()}
    lost = partial(_bench_lost, 1 if quick else 7)
    return {**of_steps, "gpt, state lost": lost, "torch async_save": partial(_bench_save, 3 if quick else 15)}


def _bench_steps(case: str, flags: tuple[str, ...], num_rounds: int, num_steps: int, folder: Path) -> list[BenchRow]:
    def measured(every: str) -> BenchRun:
        common = ("--steps", str(num_steps), "--validate-every", "0", "--checkpoint-every", every)
        return run_bamboo(folder, *common, *flags)

    rare = ("100",) if num_steps > 100 else ()  # a shorter run has no such checkpoint
    runs = in_turns({every: partial(measured, every) for every in ("1", *rare, "0")}, num_rounds)
    steps = {every: [_seconds_of_step(each) for each in side] for every, side in runs.items()}
    records = [record for run in runs["1"] for record in run.history.of(KeptRecord)]
    none = median(steps["0"])
    often = f"{case}, every step"
    rows = [paired_row(often, "step s, beside none", steps["1"], steps["0"], _GOALS[case])]
    for every in rare:
        title = f"{case}, every {every} steps"
        rows.append(paired_row(title, "step s, beside none", steps[every], steps["0"], _RARE_GOAL))
    for part in ("copy", "write", "sync"):
        seconds = median(getattr(each, f"{part}_ns") for each in records) / 1e9
        rows.append(row(often, f"{part} s, of all workers, beside a step", seconds, none, len(records)))
    return [*rows, row(often, "whole checkpoints, beside steps", len(records), num_rounds * num_steps, num_rounds)]


def _bench_lost(num_runs: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time from the death of the only holder of a stage to the next commit."""
    flags = ("--steps", str(_LOST_STEP + 2), "--validate-every", "0", "--checkpoint-every", "1", "--redundancy", "none")
    back, first = [], []
    for _ in range(num_runs):
        run = run_bamboo(folder, *flags, "--kill", f"{_LOST_STEP}:2", "--no-twin")
        death_ns = min(each.at_ns for each in run.history.of(FaultRecord))
        commits_ns = [each.at_ns for each in run.history.of(CommitRecord)]
        back.append(min(each for each in commits_ns if each > death_ns) - death_ns)
        first.append(commits_ns[0] - run.started_ns)
    metric = "death to the next commit s, beside command to first commit"
    return [row("gpt, state lost", metric, median(back) / 1e9, median(first) / 1e9, num_runs, _BACK_GOAL)]


def _seconds_of_step(run: BenchRun) -> float:
    """Returns the mean seconds from one commit to the next, without the first steps."""
    at_ns = [each.at_ns for each in run.history.of(CommitRecord)][2:]
    return (at_ns[-1] - at_ns[0]) / (len(at_ns) - 1) / 1e9


class _NoAgent:
    """The control of a worker without an agent: drops messages, and polls."""

    def send(self, message: object) -> None:
        pass

    def wake(self) -> None:
        pass

    def wait_until(self, look: Any) -> None:
        while look() is None:
            time.sleep(0.0005)


def _bench_save(num_saves: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of saves of the whole state of the demo by one process, on both sides."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        ours = _our_saves(num_saves, Path(name, "ours"))
        arguments = ["-m", "engine.bench.async_save_peer", str(num_saves), str(Path(name, "peer"))]
        matches = re.findall(r"returned_s=([0-9.]+) saved_s=([0-9.]+)", run_python(folder, arguments).stdout)
    peer = [(float(returned), float(saved)) for returned, saved in matches]
    rows = []
    for at, metric in enumerate(("the call returns s", "the state is on disk s")):
        one, other = (median(each[at] for each in side) for side in (ours, peer))
        rows.append(ratio_row("torch async_save", metric, one, other, num_saves, 1.0))
    return rows


def _our_saves(num_saves: int, folder: Path) -> list[tuple[float, float]]:
    writer = CheckpointWriter(cast(Any, _NoAgent()), demo_replicas(), str(folder))
    times = []
    for step in range(num_saves):
        start_s = time.monotonic()
        writer.keep(Keep(step, (StateShare((0, 0)),)))
        returned_s = time.monotonic()
        writer.join_writes()
        times.append((returned_s - start_s, time.monotonic() - start_s))
    return times
