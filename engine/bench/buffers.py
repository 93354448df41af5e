"""The buffers benchmark: the cost of replicating a layer's buffer, small or large, constant or changing.

Whole runs take turns: with a shadow, without redundancy, and with a shadow but without the buffer.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.bench.figures import BenchRow, Cases, in_turns, paired_row
from engine.bench.runs import run_bamboo, seconds_between_commits, timed_flags
from engine.core.job.job import Job
from engine.core.units import Args
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

_WIDTH = 32  # of the synthetic vectors


class Buffered(nn.Module):
    """A linear map with a buffer; if `is_changed`, each forward of training changes every element of the buffer."""

    held: Tensor

    def __init__(self, kib: int, is_changed: bool):
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.is_changed = is_changed
        self.register_buffer("held", torch.ones(kib * 256))

    def forward(self, x: Tensor) -> Tensor:
        """Reads the buffer; may change it."""
        if self.is_changed and self.training:
            self.held.neg_()
        return self.linear(x) + self.held[:1].mean()


def buffered(kib: int = 0, is_changed: bool = False) -> Model:
    """Returns a model of two layers, the second with a buffer of `kib` KiB, or without one if `kib` is 0."""
    last = partial(Buffered, kib, is_changed) if kib else partial(nn.Linear, _WIDTH, _WIDTH)
    first = LayerSpec("first", "Linear", partial(nn.Linear, _WIDTH, _WIDTH))
    return Model((first, LayerSpec("last", "Buffered", last)), default_loss)


def buffer_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench buffers`."""
    cases = {}
    for size, kib in {"4 KiB": 4, "64 MiB": 64 * 1024}.items():
        for kind in ("constant", "changed"):
            args: Args = {"kib": kib, "is_changed": kind == "changed"}
            job = Job(model=f"{__name__}:buffered", model_args=args, stages=2, microbatches=4)
            name = f"{kind} {size}"
            cases[name] = partial(_bench, name, job, *((1, 3) if quick else (5, 12)))
    return cases


def _bench(case: str, job: Job, num_rounds: int, num_steps: int, folder: Path) -> list[BenchRow]:
    jobs = {
        "lazy": job,
        "beside none": replace(job, redundancy="none"),
        "beside lazy without the buffer": replace(job, model_args={}),
    }

    def measured(job: Job) -> tuple[float, float]:
        run = run_bamboo(folder, *timed_flags(replace(job, steps=num_steps)))
        return seconds_between_commits(run), sum(json.loads(run.stdout)["peak_memory_mib"].values())

    results = in_turns({name: partial(measured, each) for name, each in jobs.items()}, num_rounds)
    lazy, *peers = ((name, [*zip(*figures, strict=True)]) for name, figures in results.items())
    return [
        paired_row(case, f"{metric}, {name}", lazy[1][number], figures[number])
        for number, metric in enumerate(("step s", "peak memory of all MiB"))
        for name, figures in peers
    ]
