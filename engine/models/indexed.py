"""A finite data set as a pure source: `indexed` takes any map-style data set, with ``__len__`` and ``__getitem__``.

    from engine.models.indexed import indexed

    def mine(seed):
        return indexed(training, validation, DataFacts(task="classify", num_classes=10, features=32), seed=seed)

Every sample is trained once in every pass over the training set, in an order that the seed and the pass decide
(`engine.core.samples.ledger`). No order is kept in memory, so that a run can go on at any step.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import default_collate

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.core.random_key import random_key
from engine.core.samples.ledger import first_position, sample_at, shares
from engine.models.data import Data, DataFacts
from engine.models.layers import Batch, Tensors


class MapStyle(Protocol):
    """A data set whose samples have numbers from 0 on, such as a torch.utils.data.Dataset."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, number: int, /) -> Any:
        """Returns one sample."""


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Indexed:
    """The result of `indexed`, before the job is known."""

    training: MapStyle
    validation: MapStyle
    facts: DataFacts
    seed: int
    collate: Collate
    draws: bool

    def of(self, job: Job) -> IndexedData:
        """Returns the source of the microbatches of a job."""
        return IndexedData(self, job)


def indexed(
    training: MapStyle,
    validation: MapStyle,
    facts: DataFacts,
    *,
    seed: int,
    collate: Collate = default_collate,
    draws: bool = False,
) -> Indexed:
    """Makes a source of microbatches from two data sets: one to train on, one that training never sees.

    A sample is a pair of inputs and targets, each a tensor, a number or a sequence of them. `collate` makes a
    microbatch of a list of samples: such a pair, or a Batch. With `draws`, reading a training sample may draw from the
    random streams of the process (torch's, Python's and numpy's), as augmentations do: each sample of each pass has a
    key. Raises UserError if a data set is empty.
    """
    for name, each in (("training", training), ("validation", validation)):
        if not len(each):
            raise UserError([Problem("data", f"at least one sample in the {name} set", "an empty one")])
    return Indexed(training, validation, facts, seed, collate, draws)


class IndexedData:
    """The microbatches of a finite data set for one job; `num_samples` are in its training set."""

    def __init__(self, source: Indexed, job: Job):
        self.facts = source.facts
        self.num_samples = len(source.training)
        self._source, self._job = source, job

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns the next `size` training samples of the row of all samples of a run."""
        position = first_position(self._job, step, pipeline, microbatch)
        return self._collated([self._training_sample(*at) for at in self._places(position, size)])

    def validation(self, index: int, size: int) -> Batch:
        """Returns the next `size` samples of the validation set in its order, cyclically."""
        samples = self._source.validation
        numbers = (number % len(samples) for number in range(index * size, (index + 1) * size))
        return self._collated([samples[number] for number in numbers])

    def _places(self, position: int, size: int) -> Iterator[tuple[int, int]]:
        for share in shares(position, size, self.num_samples):
            for place in range(share.first, share.first + share.length):
                yield share.data_epoch, place

    def _training_sample(self, data_epoch: int, place: int) -> Any:
        source = self._source
        number = sample_at(data_epoch, place, self.num_samples, source.seed)
        if source.draws:
            # The streams are not set back: a source that touches them is never read ahead, in another thread.
            _set_streams(random_key(source.seed, "sample", data_epoch, number))
        return source.training[number]

    def _collated(self, samples: list[Any]) -> Batch:
        made = self._source.collate(samples)
        if isinstance(made, Batch):
            return made
        if not isinstance(made, Sequence) or len(made) != 2:
            raise TypeError(f"collate: expected a pair of inputs and targets or a Batch, found {type(made).__name__}")
        inputs, targets = made
        return Batch(_tensors(inputs, "inputs"), _tensors(targets, "targets"))


def bound(made: Data | Indexed, job: Job) -> Data:
    """Returns a source of data for a job."""
    return made.of(job) if isinstance(made, Indexed) else made


def num_samples(data: Data) -> int:
    """Returns the number of samples in the training set of a source; 0 for one without limit."""
    return int(getattr(data, "num_samples", 0))


def _tensors(part: Any, name: str) -> Tensors:
    tensors = tuple(part) if isinstance(part, list | tuple) else (part,)
    for each in tensors:
        if not isinstance(each, Tensor):
            raise TypeError(f"collate: expected tensors in the {name}, found {type(each).__name__}")
    return tensors


def _set_streams(key: int) -> None:
    torch.default_generator.manual_seed(key)
    random.seed(key)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(key % 2**32)
