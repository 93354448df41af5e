"""Streams of token sequences: a plain one, one with a state of its own, and microbatches in buckets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.random_key import random_key
from engine.models.layers import Batch
from engine.models.packing import Sample, bucketed, next_tokens, padded
from tests.e2e.length_models import VOCABULARY

NUMBER = 7  # sequences of a pass, of which none fits into whole steps


def sequence(number: int) -> list[int]:
    """Returns a sequence by its number, which is in its first tokens: 3 to 10 tokens."""
    dice = random.Random(number)  # noqa: S311 - the same number makes the same sequence
    return [number % VOCABULARY, number // VOCABULARY, *(dice.randrange(VOCABULARY) for _ in range(dice.randint(1, 8)))]


def number_of(inputs: Tensor) -> int:
    """Returns the number of a sequence from a row of the first layer's inputs."""
    return int(inputs[0] + VOCABULARY * inputs[1])


def plain(count: int = NUMBER) -> Iterator[Sample]:
    """Makes a stream that can be read once, and draws."""
    for number in range(count):
        inputs, targets = next_tokens(sequence(number))
        targets[torch.rand(targets.shape) < 0.2] = -100
        yield inputs, targets


class Stateful:
    """A stream that can go on from a state; it counts the items that it has made."""

    made = 0

    def __init__(self, count: int = NUMBER):
        self._count, self._next, self._epoch = count, 0, 0

    def __iter__(self) -> Iterator[Sample]:
        while self._next < self._count:
            Stateful.made += 1
            self._next += 1
            yield next_tokens(sequence((self._next - 1 + self._epoch) % self._count))

    def set_epoch(self, number: int) -> None:
        self._epoch = number

    def state_dict(self) -> dict[str, Any]:
        return {"next": self._next, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._next, self._epoch = state["next"], state["epoch"]


def buckets(seed: int, count: int = 40) -> Iterator[Batch]:
    """Makes a stream of whole microbatches."""
    return bucketed(map(sequence, range(count)), tokens=24, window=16, seed=random_key(seed, "buckets"))


class Vectors(Stateful):
    """A stream of rows to regress, for models that are built in."""

    def __iter__(self) -> Iterator[Sample]:
        for inputs, _ in super().__iter__():
            row = torch.zeros(32)
            row[: len(inputs)] = inputs / VOCABULARY
            yield row, row.sum()[None]


def collated(samples: Sequence[Sample]) -> Batch:
    """Makes a microbatch of the samples of a stream."""
    return padded(samples)
