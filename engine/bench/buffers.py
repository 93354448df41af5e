"""The buffers benchmark: what it costs to keep a layer's buffers, small and large, constant and changed, for an heir.

Whole runs in turns: with a shadow, without redundancy, and with a shadow but without the buffer; every round begins
with another.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from engine.bench.figures.rows import Row, paired_row
from engine.bench.redundancy import timed_flags
from engine.bench.runs import run_bamboo, seconds_between_commits
from engine.core.config.job import Job
from engine.core.scalar import Args
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss

_WIDTH = 32  # of the synthetic vectors


class Buffered(nn.Module):
    """A linear map beside a buffer, which each forward changes everywhere, or nowhere."""

    held: Tensor

    def __init__(self, kib: int, is_changed: bool):
        super().__init__()
        self.linear = nn.Linear(_WIDTH, _WIDTH)
        self.is_changed = is_changed
        self.register_buffer("held", torch.ones(kib * 256))

    def forward(self, x: Tensor) -> Tensor:
        """Reads the buffer, and changes all of it if it is one that changes."""
        if self.is_changed and self.training:
            self.held.neg_()
        return self.linear(x) + self.held[:1].mean()


def buffered(kib: int = 0, is_changed: bool = False) -> Model:
    """Makes two layers; the second has a buffer, if it is to have one."""
    last = partial(Buffered, kib, is_changed) if kib else partial(nn.Linear, _WIDTH, _WIDTH)
    first = LayerSpec("first", "Linear", partial(nn.Linear, _WIDTH, _WIDTH))
    return Model((first, LayerSpec("last", "Buffered", last)), default_loss)


def buffer_cases() -> dict[str, Job]:
    """Returns the cases, name -> job."""
    return {
        f"{kind} {size}": _job(kib=kib, is_changed=kind == "changed")
        for size, kib in {"4 KiB": 4, "64 MiB": 64 * 1024}.items()
        for kind in ("constant", "changed")
    }


def _job(kib: int, is_changed: bool) -> Job:
    args: Args = {"kib": kib, "is_changed": is_changed}
    return Job(model=f"{__name__}:buffered", model_args=args, stages=2, microbatches=4)


def bench_buffers(case: str, job: Job, num_rounds: int, num_steps: int, folder: Path) -> list[Row]:
    """Measures the step and the peak memory of one case, beside the same without redundancy and without the buffer.

    Raises:
        WorkerFailedError: a run failed.
    """
    sides = {
        "lazy": job,
        "beside none": replace(job, redundancy="none"),
        "beside lazy without the buffer": replace(job, model_args={}),
    }
    names = [*sides]
    seconds: dict[str, list[float]] = {name: [] for name in names}
    mib: dict[str, list[float]] = {name: [] for name in names}
    for number in range(num_rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            run = run_bamboo(folder, *timed_flags(replace(sides[name], steps=num_steps)))
            seconds[name].append(seconds_between_commits(run))
            mib[name].append(sum(json.loads(run.stdout)["peak_memory_mib"].values()))
    return [
        paired_row(case, f"{metric}, {peer}", found["lazy"], found[peer], None)
        for metric, found in (("step s", seconds), ("peak memory of all MiB", mib))
        for peer in names[1:]
    ]
