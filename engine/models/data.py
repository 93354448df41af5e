"""What a data source is to the engine: facts about its samples, and microbatches by number.

Rule: a microbatch is a pure function of (seed, step, pipeline, microbatch) and a validation microbatch one of its
index alone, so any worker can load any of them, again or out of order. All tensors are on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import torch

from engine.core.random_key import random_key
from engine.models.layers import Batch

Task = Literal["causal", "masked", "classify", "regress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """What a model must know to fit the data; a size that the task has no use for is 0.

    causal, masked: inputs and targets are int64 [size, sequence], below `vocabulary`. classify: inputs are float32
    [size, channels, height, width], targets int64 [size], below `num_classes`. regress: inputs are float32
    [size, features], targets float32 [size, outputs].
    """

    task: Task
    vocabulary: int = 0
    sequence: int = 0
    num_classes: int = 0
    channels: int = 0
    height: int = 0
    width: int = 0
    features: int = 0
    outputs: int = 0
    form: object = None  # of the first layer's arguments, where they are more than tensors (engine.models.nests)


@runtime_checkable
class Data(Protocol):
    """A source of microbatches."""

    @property
    def facts(self) -> DataFacts:
        """What a model must know."""

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples."""

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples that training never sees; `index` counts from 0 and has no end."""


def keyed_generator(seed: int, *parts: int | str) -> torch.Generator:
    """Returns a fresh CPU generator seeded with the key of these parts."""
    return torch.Generator().manual_seed(random_key(seed, *parts))


def training_generator(seed: int, step: int, pipeline: int, microbatch: int) -> torch.Generator:
    """Returns the generator of one training microbatch: everything random in it is drawn from there."""
    return keyed_generator(seed, "data", step, pipeline, microbatch)
