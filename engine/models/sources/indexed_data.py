"""The microbatches of a finite data set: samples by the ledger, collated."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.core.random_key import random_key
from engine.core.samples.ledger import first_position, sample_at, shares
from engine.models.data import Columns, Data
from engine.models.indexed import Indexed
from engine.models.layers import Batch, Tensors
from engine.models.sources.columns import batch_of, collate_columns, named_inputs
from engine.models.sources.seen_facts import seen_facts
from engine.models.user_factory import import_factory


class IndexedData:
    """The microbatches of a finite data set for one job; `num_samples` are in its training set."""

    def __init__(self, source: Indexed, job: Job):
        self.num_samples = len(source.training)
        self.evaluation_sets = {name: len(each) for name, each in source.evaluations.items()}
        self._source, self._job = source, job
        self._seed = job.seed if source.seed is None else source.seed
        self._collate = import_factory("collate", job.collate) if job.collate else source.collate
        if source.facts is None or self._collate is not None or isinstance(self._training_sample(0, 0), Mapping):
            form, batch = self._formed(self._training_samples(0, job.microbatch_size))
            facts = source.facts or seen_facts(batch, form, source.training)
            self.facts = replace(facts, form=form)
        else:
            self.facts = source.facts

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns the next `size` training samples of the row of all samples of a run."""
        return self._collated(self._training_samples(first_position(self._job, step, pipeline, microbatch), size))

    def samples_of(self, step: int, pipeline: int, microbatch: int) -> list[int]:
        """Returns the numbers of the samples of a microbatch in the training set."""
        places = self._places(first_position(self._job, step, pipeline, microbatch), self._job.microbatch_size)
        return [sample_at(*at, self.num_samples, self._seed) for at in places]

    def validation(self, index: int, size: int) -> Batch:
        """Returns the next `size` samples of the first evaluation set."""
        return self.evaluation(next(iter(self.evaluation_sets)), index, size)

    def evaluation(self, name: str, index: int, size: int) -> Batch:
        """Returns the next `size` samples of an evaluation set in its order, cyclically."""
        samples = self._source.evaluations[name]
        numbers = (number % len(samples) for number in range(index * size, (index + 1) * size))
        return self._collated([samples[number] for number in numbers])

    def _training_samples(self, position: int, size: int) -> list[Any]:
        return [self._training_sample(*at) for at in self._places(position, size)]

    def _places(self, position: int, size: int) -> Iterator[tuple[int, int]]:
        for share in shares(position, size, self.num_samples):
            for place in range(share.first, share.first + share.length):
                yield share.data_epoch, place

    def _training_sample(self, data_epoch: int, place: int) -> Any:
        source = self._source
        number = sample_at(data_epoch, place, self.num_samples, self._seed)
        if source.draws:
            # The streams are not set back: a source that touches them is never read ahead, in another thread.
            _set_streams(random_key(self._seed, "sample", data_epoch, number))
        return source.training[number]

    def _collated(self, samples: list[Any]) -> Batch:
        form, batch = self._formed(samples)
        if form != self.facts.form:
            raise ValueError(f"collate: expected the same columns in every microbatch, found {form}")
        return batch

    def _formed(self, samples: list[Any]) -> tuple[Columns | None, Batch]:
        """Returns the microbatch of some samples, and the names of its inputs if they have names."""
        usual = collate_columns if isinstance(samples[0], Mapping) else default_collate
        made = (self._collate or usual)(samples)
        if isinstance(made, Batch):
            return None, made
        if isinstance(made, Mapping):
            return batch_of(made)
        if not isinstance(made, Sequence) or len(made) != 2:
            expected = "a pair of inputs and targets, a mapping of columns or a Batch"
            raise TypeError(f"collate: expected {expected}, found {type(made).__name__}")
        inputs, targets = made
        if isinstance(inputs, Mapping):
            return named_inputs(inputs, _tensors(targets, "targets"))
        return None, Batch(_tensors(inputs, "inputs"), _tensors(targets, "targets"))


def bound(made: Data | Indexed, job: Job) -> Data:
    """Returns a source of data for a job; raises UserError for a collate function that it cannot use."""
    if isinstance(made, Indexed):
        return IndexedData(made, job)
    if job.collate:
        raise UserError([Problem("collate", "a data set of samples", repr(job.data), "this source makes microbatches")])
    return made


def num_samples(data: Data) -> int:
    """Returns the number of samples in the training set of a source; 0 for one without limit."""
    return int(getattr(data, "num_samples", 0))


def samples_of(data: Data, step: int, pipeline: int, microbatch: int) -> list[int]:
    """Returns the numbers of the samples of a microbatch in the training set; none for a source without limit."""
    named = getattr(data, "samples_of", None)
    return list(named(step, pipeline, microbatch)) if named else []


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
