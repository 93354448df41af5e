"""The trial of the data before training: a microbatch has the same bits in any order, at any time, in any process.

    at first    microbatches 0 and 1 of step 0, which the layers are tried with
    then        some of other steps and pipelines, and of the validation, in another order in each worker
    at last     1 and 0 again, two seconds later by the clock; all that were loaded must still have their bits

Before each call the random streams of the process have another position, in each worker another one. The part between
ends early where a source is slow: the trial must not hold up the launch.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from engine.core.checks.loaded_data import another, impure_data, named
from engine.core.config.job import Job
from engine.core.errors import Problem
from engine.core.samples.evaluation import parts_of
from engine.models.data import Data
from engine.models.layers import Batch
from engine.models.sources.evaluations import evaluation, evaluation_sets
from engine.runtime.stage.layer_trial import MICROBATCHES
from engine.runtime.stage.random_streams import displace
from engine.runtime.worker.microbatch_loader import mark_of

_SPARE_S = 0.015  # for the part between
_AWAY_S = 2  # no more: a source may wait for the time that it has read, or keep it
_MOST_CALLS = 100
_AGAIN = "when they are loaded again"

Load = Callable[[], Batch]


@dataclass(slots=True)
class DataTrial:
    """Loads microbatches for one worker; `problem` is the first sign of a source that is not pure."""

    job: Job
    data: Data
    worker: int = 0
    marks: dict[str, str] = field(default_factory=dict)  # by the name of the microbatch
    problem: Problem | None = None
    _loaded: list[tuple[str, Batch]] = field(default_factory=list)
    _num_calls: int = 0
    _quickest_s: float = math.inf  # call: a busy machine makes others slow

    def first(self) -> list[Batch]:
        """Returns the microbatches that the layers are tried with."""
        return [self._call(*self._training(0, 0, microbatch)) for microbatch in self._first_two()]

    def others(self) -> None:
        """Loads more microbatches while there is time; an exception is left to training."""
        end_s = time.monotonic() + _SPARE_S
        for name, load in self._in_own_order([*self._elsewhere(), *self._validation()]):
            if time.monotonic() + self._quickest_s > end_s:
                break
            with contextlib.suppress(Exception):
                self._call(name, load)

    def again(self) -> None:
        """Loads the first microbatches again, and looks at all that have been loaded."""
        with _another_time():
            for microbatch in reversed(self._first_two()):
                self._call(*self._training(0, 0, microbatch))
        for name, batch in self._loaded:
            if self.problem is None and mark_of(batch) != self.marks[name]:
                self.problem = impure_data(self.job.data, f"{name} was overwritten by a later call")

    def _first_two(self) -> list[int]:
        # A job of one microbatch has no second one: data in whole batches could not supply it.
        return [min(microbatch, self.job.microbatches - 1) for microbatch in MICROBATCHES]

    def _training(self, step: int, pipeline: int, microbatch: int) -> tuple[str, Load]:
        size = self.job.microbatch_size
        load = partial(self.data.microbatch, step, pipeline, microbatch, size)
        return named(microbatch, pipeline, step), load

    def _elsewhere(self) -> Iterator[tuple[str, Load]]:
        last_step, last_pipeline, last = self.job.steps - 1, self.job.pipelines - 1, self.job.microbatches - 1
        yield self._training(min(1, last_step), 0, 0)
        yield self._training(0, last_pipeline, last)
        yield self._training(last_step // 2, last_pipeline // 2, last // 2)
        yield self._training(last_step, last_pipeline, last)
        yield self._training(last_step, 0, 0)

    def _validation(self) -> Iterator[tuple[str, Load]]:
        parts = parts_of(self.job, evaluation_sets(self.data)) if self.job.validate_every else ()
        last = {part.name: part for part in parts}
        for part in parts:
            if part.number == 0 or part == last[part.name]:
                load = partial(evaluation, self.data, part.name, part.number, self.job.microbatch_size)
                yield f"{part.name} microbatch {part.number}", load

    def _in_own_order(self, calls: list[tuple[str, Load]]) -> list[tuple[str, Load]]:
        """Returns calls in an order that differs between workers: a source that counts its calls gives them others."""
        turn = self.worker % len(calls)
        return (calls[turn:] + calls[:turn])[:: -1 if self.worker % 2 else 1]

    def _call(self, name: str, load: Load) -> Batch:
        displace(self.worker * _MOST_CALLS + self._num_calls)
        self._num_calls += 1
        start_s = time.monotonic()
        batch = load()
        mark = mark_of(batch)
        self._quickest_s = min(self._quickest_s, time.monotonic() - start_s)
        if name not in self.marks:
            self.marks[name] = mark
            self._loaded.append((name, batch))
        elif self.marks[name] != mark and self.problem is None:
            self.problem = another(self.job.data, name, (self.marks[name], mark), _AGAIN)
        return batch


@contextlib.contextmanager
def _another_time() -> Iterator[None]:
    """Moves the wall clock of this thread, as `time.time` and `time.time_ns` tell it."""
    here, seconds, nanoseconds = threading.get_ident(), time.time, time.time_ns

    def away_s() -> int:
        return _AWAY_S * (threading.get_ident() == here)

    time.time = lambda: seconds() + away_s()
    time.time_ns = lambda: nanoseconds() + away_s() * 10**9
    try:
        yield
    finally:
        time.time, time.time_ns = seconds, nanoseconds
