"""The microbatches of a finite data set: samples by the ledger, collated."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.core.config.job import Job
from engine.core.random_key import random_key
from engine.core.samples.ledger import first_position, sample_at, shares
from engine.models.data import Data
from engine.models.indexed import Indexed
from engine.models.layers import Batch, Tensors


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
    return IndexedData(made, job) if isinstance(made, Indexed) else made


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
