"""The workers' part of `bamboo.hf.Trainer`: microbatches in files, in the order of the Trainer, and its learning rate.

A folder has the microbatches of a whole training, one behind the other: `PER_FILE` of them in each safetensors file, as
``NUMBER.COLUMN``. Shapes must not change in a run, so a smaller microbatch is filled when it is read: with its own
first row, and at the ends of rows with zeros, all with targets that do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.optim import Optimizer

from engine.core.errors import Problem, UserError
from engine.models.data_sources import TARGETS, batch_of, seen_facts
from engine.models.layers import Batch
from engine.models.losses import IGNORED

PER_FILE = 256


def place_of(number: int) -> tuple[str, str]:
    """Returns the file of a microbatch in its folder, and the prefix of its columns there."""
    return f"{number // PER_FILE:06}.safetensors", f"{number % PER_FILE}."


def narrowed(tensor: Tensor) -> Tensor:
    """Returns int64 values as int32 if they fit, which a file keeps; other tensors as they are."""
    limits = torch.iinfo(torch.int32)
    fits = tensor.dtype == torch.int64 and bool(((tensor >= limits.min) & (tensor <= limits.max)).all())
    return tensor.to(torch.int32) if fits else tensor


class WrittenBatches:
    """A source of microbatches of `rows` rows from a folder; a step has `per_step` of them, over all pipelines.

    `lengths` names the columns whose rows differ in length, with the longest: ``input_ids=12,labels=12``.
    """

    evaluation_sets: Mapping[str, int] = {}

    def __init__(self, folder: str, rows: int, per_step: int, microbatches: int, lengths: str = ""):
        self._folder, self._rows = Path(folder), rows
        self._per_step, self._microbatches = per_step, microbatches
        parts = (part.partition("=") for part in lengths.split(",") if part)
        self._lengths = {name: int(length) for name, _, length in parts}
        form, batch = batch_of(self._columns(0))
        self.facts = replace(seen_facts(batch, form, None), form=form)

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns a microbatch of the training."""
        return batch_of(self._columns(step * self._per_step + pipeline * self._microbatches + microbatch))[1]

    def validation(self, index: int, size: int) -> Batch:
        """Raises UserError: there are no samples that training never sees."""
        raise UserError([Problem("validate_every", "0", "", "the Trainer evaluates in its own process")])

    def _columns(self, number: int) -> dict[str, Tensor]:
        from safetensors import safe_open

        name, prefix = place_of(number)
        with safe_open(self._folder / name, "pt") as file:
            names = sorted(each for each in file.keys() if each.startswith(prefix))  # noqa: SIM118 (no mapping)
            return {each.removeprefix(prefix): self._filled(each, file.get_tensor(each)) for each in names}

    def _filled(self, name: str, tensor: Tensor) -> Tensor:
        column = name.partition(".")[2]
        if not tensor.dim():
            return tensor
        filler = IGNORED if column in TARGETS else 0
        tensor = tensor.long() if tensor.dtype == torch.int32 else tensor
        if (length := self._lengths.get(column)) is not None:
            tensor = pad(tensor, (0, length - tensor.shape[1]), value=filler)
        if missing := self._rows - tensor.shape[0]:
            more = tensor[:1].expand(missing, *tensor.shape[1:])
            tensor = torch.cat([tensor, torch.full_like(more, IGNORED) if column in TARGETS else more])
        return tensor.clone(memory_format=torch.contiguous_format)


class _Untrained(Optimizer):
    """An optimizer without parameters to train, whose constructor does not import torch's compiler."""

    def __init__(self) -> None:
        self.param_groups = [{"params": [], "lr": 1.0}]
        self.defaults: dict[str, Any] = {"lr": 1.0}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Changes nothing."""


def rate_factor(step: int, *, kind: str = "linear", warmup: int = 0, steps: int = 0, **others: float | str) -> float:
    """Returns the factor of a step's rate by transformers' schedule `kind`; raises UserError if it needs more."""
    return float(_schedule(kind, warmup, steps, tuple(others.items()))(step))


@lru_cache(maxsize=4)
def _schedule(kind: str, warmup: int, steps: int, others: tuple[tuple[str, float | str], ...]) -> Any:
    from transformers import get_scheduler

    made = get_scheduler(kind, _Untrained(), warmup, steps, dict(others))
    if not hasattr(made, "lr_lambdas"):
        hint = "a rate that depends on a loss is not known before the step: choose linear or cosine"
        raise UserError([Problem("lr_scheduler_type", "a schedule of the step alone", repr(kind), hint)])
    return made.lr_lambdas[0]
