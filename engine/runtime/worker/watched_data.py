"""A data source whose calls are watched: loading data is a state of its own, and a slow source can load ahead.

Rule: only a source that draws from no stream of the process may load ahead. It would disturb the draws of the layers,
and they its own. Its first calls, among them those of the trial before training, tell whether it draws.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from engine.core.samples.evaluation import EvaluationSets
from engine.models.data import Data, DataFacts
from engine.models.layers import Batch
from engine.models.sources.evaluations import evaluation, evaluation_sets
from engine.models.sources.indexed_data import num_samples, samples_of
from engine.runtime.ipc.whereabouts import Whereabouts
from engine.runtime.stage.random_streams import positions

_CHECKED_CALLS = 20
_LEAST_CALLS = 2
_SLOW_S = 0.005  # a hand-over to another thread takes longer than a quicker call


class WatchedData:
    """The calls of `data`, which `whereabouts` tells."""

    def __init__(self, data: Data, whereabouts: Whereabouts):
        self._data, self._whereabouts = data, whereabouts
        self._num_calls = 0
        self._draws = self._is_slow = False

    @property
    def facts(self) -> DataFacts:
        """The facts that a model needs."""
        return self._data.facts

    @property
    def num_samples(self) -> int:
        """The number of samples in the training set; 0 for a source without limit."""
        return num_samples(self._data)

    def samples_of(self, step: int, pipeline: int, microbatch: int) -> list[int]:
        """Returns the numbers of the samples of a microbatch in the training set; none for a source without limit."""
        return samples_of(self._data, step, pipeline, microbatch)

    @property
    def may_load_ahead(self) -> bool:
        """Whether the last call was slow, and no call has drawn from a stream of the process."""
        return self._is_slow and not self._draws and self._num_calls >= _LEAST_CALLS

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples, loaded in the main thread."""
        return self._watched(self._data.microbatch, step, pipeline, microbatch, size)

    def microbatch_ahead(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        """Returns `size` training samples, loaded in another thread."""
        return self._timed(True, self._data.microbatch, step, pipeline, microbatch, size)

    @property
    def evaluation_sets(self) -> EvaluationSets:
        """The number of samples of each evaluation set by its name; 0 for a set without limit."""
        return evaluation_sets(self._data)

    def validation(self, index: int, size: int) -> Batch:
        """Returns `size` samples that training never sees."""
        return self._watched(self._data.validation, index, size)

    def evaluation(self, name: str, index: int, size: int) -> Batch:
        """Returns `size` samples of an evaluation set."""
        return self._watched(partial(evaluation, self._data, name), index, size)

    def await_ahead(self, wait: Callable[[], Batch]) -> Batch:
        """Returns the outcome of a wait of the main thread for another one that loads."""
        return self._told(False, wait)

    def _watched(self, load: Callable[..., Batch], *at: int) -> Batch:
        if self._draws or self._num_calls >= _CHECKED_CALLS:
            return self._timed(False, load, *at)
        before = positions()
        batch = self._timed(False, load, *at)
        after = positions()
        self._draws = any(after[stream] != position for stream, position in before.items())
        self._num_calls += 1
        return batch

    def _timed(self, ahead: bool, load: Callable[..., Batch], *at: int) -> Batch:
        start_s = time.monotonic()
        batch = self._told(ahead, load, *at)
        self._is_slow = time.monotonic() - start_s >= _SLOW_S
        return batch

    def _told(self, ahead: bool, load: Callable[..., Batch], *at: int) -> Batch:
        self._whereabouts.load(True, ahead=ahead)
        try:
            return load(*at)
        finally:
            self._whereabouts.load(False, ahead=ahead)
