"""Small jobs whose models have all that can go wrong: random numbers, buffers, history, ties."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.core.job.job import Job
from engine.models.data import Data
from engine.models.layers import Model
from engine.runtime.device.device import HOST
from engine.runtime.stage.stage import Stage
from engine.runtime.transport.transport import Border

WIDTH = 32  # of the synthetic vectors


class Block(nn.Module):
    """Normalises, multiplies and drops: random numbers, buffers and a residual connection in one layer."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.dropout(self.linear(self.norm(x)), 0.3, self.training)


def normed() -> list[nn.Module]:
    """Makes a model whose layers have buffers."""
    return [nn.Linear(WIDTH, WIDTH), Block(), Block(), Block(), nn.Linear(WIDTH, 1)]


class Deep(nn.Module):
    """Saves much more than its input: forty times as many bytes."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(40))
        self.is_last = is_last

    def forward(self, x: Tensor) -> Tensor:
        for linear in self.linears:
            x = linear(x).tanh()
        return x.mean(1, keepdim=True) if self.is_last else x


def even(depth: int) -> list[nn.Module]:
    """Makes a model whose layers all save the same number of bytes."""
    return [Deep(number == depth - 1) for number in range(depth)]


class Turned(nn.Module):
    """Like spectral normalisation: what it returns depends on a buffer that every forward changes."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.register_buffer("seen", torch.ones(WIDTH))
        self.sometimes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen * 0.5 + x.detach().mean(0)
        if self.seen[0] > self.seen[1]:  # so that a parameter has a gradient, or not, after some microbatches
            x = x + self.sometimes(x)
        return self.block(x) * self.seen


def stateful() -> list[nn.Module]:
    """Makes a model whose forwards depend on all that were before."""
    return [nn.Linear(WIDTH, WIDTH), Turned(), Turned(), Turned(), nn.Linear(WIDTH, 1)]


class Attending(nn.Module):
    """Attention by the kernel that torch has for it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.linear(x).view(1, len(x), 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        return x + nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2).reshape(x.shape)


def attending() -> list[nn.Module]:
    """Makes a model of attention."""
    return [nn.Linear(WIDTH, WIDTH), Attending(), Attending(), nn.Linear(WIDTH, 1)]


NORMED = {"model": "tests.runtime.small_jobs:normed", "data": "synthetic", "microbatch_size": 4}
STATEFUL = NORMED | {"model": "tests.runtime.small_jobs:stateful"}
ALL_KINDS = NORMED | {"model": "tests.e2e.state_models:all_kinds"}
TIED_GPT = {"model": "gpt", "model_args": {"width": 16, "depth": 2, "heads": 2, "tied": True}, "microbatch_size": 2}


def small_job(**values: Any) -> Job:
    return Job(**{"stages": 3, "microbatches": 4, "steps": 6, "warmup_steps": 0, "clip_norm": 0.05, **values})


def starts_of(job: Job, model: Model) -> tuple[int, ...]:
    return tuple(len(model.layers) * stage // job.stages for stage in range(job.stages))


def borders_of(job: Job, model: Model, data: Data) -> tuple[Border, ...]:
    starts = starts_of(job, model)
    inputs, borders = data.microbatch(0, 0, 0, job.microbatch_size).inputs, []
    for first, last in zip(starts, (*starts[1:], len(model.layers)), strict=True):
        borders.append(Stage(job, model, 0, first, last).probe(inputs))
        inputs = tuple(spec.zeros(HOST) for spec in borders[-1])
    return tuple(borders)
