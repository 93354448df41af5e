"""The microbatches of a worker: loaded, watched for slowness, and tried before training."""

from __future__ import annotations

import contextlib
import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count, product
from typing import TypeVar

import torch

from engine.core.action import Action
from engine.core.checks.trajectory import MARK_DIGITS, LoadedMarks, another, impure_data, named
from engine.core.errors import InvariantError, Problem, UserError, required
from engine.core.history.process_records import DataRetryRecord
from engine.core.job.job import Job, is_due
from engine.core.job.samples import EvaluationSets, parts_of
from engine.core.ownership import Slot, turned
from engine.core.texts import numbered, printable
from engine.core.transient_errors import RetryLimits, is_transient
from engine.core.units import parse_duration
from engine.models.data import Data, DataFacts
from engine.models.data_sources import StreamData, evaluation, evaluation_sets, num_samples, samples_of
from engine.models.layers import Batch, Tensors
from engine.models.losses import num_counted
from engine.models.slices import slice_of
from engine.models.token_limits import TokenLimits, limit_rows
from engine.runtime.device.device import HOST, Device
from engine.runtime.process.progress_board import LoaderStatus
from engine.runtime.stage.random_streams import displace, positions
from engine.runtime.stage.trials import MICROBATCHES

# Errors of storage that may pass: the call is tried again, with waits that double, before it costs the worker.
#
# Rules: only data are asked again, never a layer: what they return depends on the call alone, so the bits of the step
# stay. Meanwhile the worker loads data, for which nobody is evicted.

_MOST_OF_ERROR = 500  # characters in a record
_Loaded = TypeVar("_Loaded")


@dataclass(frozen=True, slots=True)
class DataRetries:
    """The further tries of calls of a data source within their limits; `tell` gets a record of each."""

    limits: RetryLimits = RetryLimits(0, 0.0)  # noqa: RUF009 - it is frozen
    tell: Callable[[DataRetryRecord], object] = lambda record: None

    def call(self, load: Callable[..., _Loaded], *at: object) -> _Loaded:
        """Returns what a call returns; raises its last error, with a note, if no try within the limits succeeds."""
        start_s = 0.0
        for number in count(1):
            try:
                return load(*at)
            except Exception as error:
                start_s = start_s or time.monotonic()
                spent_s = time.monotonic() - start_s
                wait_s = self.limits.wait_s(number, spent_s) if is_transient(error) else None
                if wait_s is None:
                    if number > 1:
                        error.add_note(f"tried {number} times in {spent_s:.1f} s")
                    raise
                name = getattr(load, "__name__", "evaluation") + str(at)
                text = printable(f"{type(error).__name__}: {error}")[:_MOST_OF_ERROR]
                self.tell(DataRetryRecord(call=name, number=number, wait_ms=round(wait_s * 1e3, 1), error=text))
                time.sleep(wait_s)
        raise InvariantError("the tries have no end")


def retry_limits(job: Job) -> RetryLimits:
    """Returns the limits of a job."""
    return RetryLimits(job.data_retries, required(parse_duration(job.data_retry_for), "a duration is checked") / 1e9)


# A data source whose calls are watched: loading data is a state of its own, and a slow source can load ahead.
#
# Rule: only a source that draws from no stream of the process may load ahead. It would disturb the draws of the layers,
# and they its own. Its first calls, among them those of the trial before training, tell whether it draws.


_CHECKED_CALLS = 20
_LEAST_CALLS = 2
_SLOW_S = 0.005  # a hand-over to another thread takes longer than a quicker call


class WatchedData:
    """The calls of `data`, which its `LoaderStatus` tells, and which are tried again after some errors."""

    def __init__(self, data: Data, whereabouts: LoaderStatus, retries: DataRetries = DataRetries()):
        self._data, self._whereabouts, self._retries = data, whereabouts, retries
        self._num_calls = 0
        self._draws = self._is_slow = False
        self._stream: StreamData | None = getattr(data, "stream", None)

    @property
    def facts(self) -> DataFacts:
        """The facts that a model needs."""
        return self._data.facts

    @property
    def num_samples(self) -> int:
        """The number of samples in the training set; 0 for a source without limit."""
        return num_samples(self._data)

    @property
    def is_stream(self) -> bool:
        """Whether the data are a stream, which has a position."""
        return self._stream is not None

    def limit_rows(self, limits: TokenLimits) -> None:
        """Lets the source refuse rows of tokens beyond some limits; raises UserError for those that it has."""
        limit_rows(self._data, limits)

    def begin_at(self, position: str) -> None:
        """Lets a stream go on from the position in a checkpoint."""
        if self._stream is not None and position:
            self._stream.begin_at(position)

    def follow(self, step: int) -> None:
        """Reads a stream on to the end of a committed step."""
        if self._stream is not None:
            self._told(False, self._stream.follow, step)

    def position_after(self, step: int) -> str:
        """Returns the position of a stream behind a step; empty for other data."""
        return "" if self._stream is None else self._told(False, self._stream.position_after, step)

    @property
    def largest(self) -> tuple[int, int, int] | None:
        """The step, pipeline and number of the largest microbatch; None if the source does not name it."""
        return getattr(self._data, "largest", None)

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

    def _told(self, ahead: bool, load: Callable[..., _Loaded], *at: int) -> _Loaded:
        self._whereabouts.load(True, ahead=ahead)
        try:
            return self._retries.call(load, *at)
        finally:
            self._whereabouts.load(False, ahead=ahead)


# The microbatches that a worker loads in training, and their marks in a step with an audit.
#
# A slow source that draws from no stream of the process loads the microbatches of the next forwards ahead, in threads.
#
# Rules: a mark is taken from the whole microbatch as soon as it is loaded. The part that was used must have the same
# bits after its backward, because a layer keeps its inputs until then. A microbatch is loaded once for all its slices
# in a program: it stays until the last of them is cut.

_Key = tuple[int, int, int]  # pipeline, stage, microbatch
_OF_NUMPY = {torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool}
_MOST_TOLD = 8  # samples in a message
_MOST_MARKED = 4000  # microbatches of a pipeline: their marks must fit into the packet of a vote


class MicrobatchLoader:
    """Loads the microbatches of one worker, one step after the other."""

    def __init__(self, job: Job, data: Data, device: Device = HOST):
        self._job, self._data, self._device = job, data, device
        self._prepared: dict[Action, Batch] = {}
        self._ahead: dict[tuple[int, Action], Future[Batch]] = {}  # by step and forward
        self._threads: ThreadPoolExecutor | None = None
        self._forwards: Sequence[Action] = ()  # with data, of one step; with slices the first of each microbatch
        self._first: dict[Action, Action] = {}  # of a slice: the first forward with data of its microbatch
        self._num_cut = Counter[Action]()  # by that forward: the forwards with data of a microbatch
        self._whole: dict[Action, tuple[Batch, int]] = {}  # by that forward, and how many slices are still to be cut
        self._counted: tuple[int, dict[tuple[int, int], int]] = (-1, {})  # a step, and the targets that count in it
        self._marks: dict[Slot, dict[int, str]] = {}  # of the open step
        self._used: dict[_Key, list[tuple[Tensors, str]]] = {}  # the parts in use and their marks, until the backward

    def load(self, step: int, action: Action) -> Batch:
        """Returns a forward's microbatch on the device; raises UserError if it was loaded with other bits before."""
        batch = self._prepared.pop(action, None) or self._loaded(step, action)
        self._load_ahead(step, action)
        return on_device(batch, self._device)

    def weight(self, step: int, action: Action) -> float | None:
        """Returns the weight of a microbatch in the loss of its step; None if all count the same.

        It is the share of the targets of the whole step that are in the microbatch, times the number of microbatches,
        so that the mean over microbatches is the mean over targets. All are loaded to be counted, before the first loss
        of the step: each worker counts the same, whatever has died. Raises UserError if none counts.
        """
        job = self._job
        if job.loss_normalisation == "microbatches":
            return None
        if self._counted[0] != step:
            places = product(range(job.pipelines), range(job.microbatches))
            self._counted = step, {place: self._num_counted(step, *place) for place in places}
        counts = self._counted[1]
        if not (total := sum(counts.values())):
            raise UserError([Problem("data", "a target that counts in each step", f"none in step {step}")])
        return counts[action.pipeline, action.microbatch] * len(counts) / total

    def _num_counted(self, step: int, pipeline: int, microbatch: int) -> int:
        batch = self._data.microbatch(step, pipeline, microbatch, self._job.microbatch_size)
        return num_counted(batch.targets, is_shifted=self._job.loss_normalisation == "next-tokens")

    def follow(self, step: int) -> None:
        """Reads a stream on to the end of a committed step, in a worker that may take over its first or last stage."""
        if isinstance(self._data, WatchedData):
            self._data.follow(step)

    def enter(self, forwards: Sequence[Action]) -> None:
        """Takes the forwards with data of the next program, in their order."""
        self.forget_prepared()
        for each in self._ahead.values():
            each.cancel()
        self._forwards, self._ahead, self._whole, self._first = forwards, {}, {}, {}
        if self._job.slices > 1:
            first: dict[tuple[int, int], Action] = {}
            self._first = {each: first.setdefault((each.pipeline, self._number(each)), each) for each in forwards}
            self._num_cut = Counter(self._first.values())
            self._forwards = [*self._num_cut]

    def _load_ahead(self, step: int, action: Action) -> None:
        """Begins to load the microbatches of the forwards after an action, also of those in the next steps."""
        data, count = self._data, self._job.load_ahead
        if not isinstance(data, WatchedData) or not data.may_load_ahead or action not in self._forwards:
            return
        if self._threads is None and count:  # a thread of its own has its own number of compute threads
            self._threads = ThreadPoolExecutor(count, "loading", partial(torch.set_num_threads, self._job.threads))
        first = self._forwards.index(action) + 1
        for place in range(first, first + count):
            steps_on, index = divmod(place, len(self._forwards))
            at_step, following = step + steps_on, self._forwards[index]
            is_cut = not steps_on and following in self._whole
            is_there = is_cut or (at_step, following) in self._ahead or following in self._prepared
            if self._threads is None or is_there or at_step >= self._job.steps:
                continue
            at = (at_step, following.pipeline, self._number(following), self._job.microbatch_size)
            self._ahead[at_step, following] = self._threads.submit(data.microbatch_ahead, *at)

    def _of_source(self, step: int, action: Action) -> Batch:
        first = self._first.get(action)
        if first is None:
            return self._called(step, action)
        whole = self._whole.pop(first, None)
        batch, left = (self._called(step, first), self._num_cut[first]) if whole is None else whole
        if left > 1:
            self._whole[first] = batch, left - 1
        return batch

    def _called(self, step: int, action: Action) -> Batch:
        ahead, data = self._ahead.pop((step, action), None), self._data
        if ahead is not None and isinstance(data, WatchedData):
            return data.await_ahead(ahead.result)
        return data.microbatch(step, action.pipeline, self._number(action), self._job.microbatch_size)

    def _number(self, action: Action) -> int:
        """Returns the number of an action's microbatch in the data; the action may be on a slice of it."""
        return action.microbatch // self._job.slices

    def prepare(self, step: int, action: Action) -> None:
        """Loads the microbatch of a later forward."""
        if action not in self._prepared:
            self._prepared[action] = self._loaded(step, action)

    def told(self, step: int, action: Action) -> str:
        """Returns the microbatch of an action in words, with the numbers of its first samples in a finite data set."""
        numbers = samples_of(self._data, step, action.pipeline, self._number(action))
        first = [*numbers[:_MOST_TOLD], *["..."] * (len(numbers) > _MOST_TOLD)]
        samples = f" ({numbered('sample', first)})" if first else ""
        return f"microbatch {self._number(action)} of pipeline {action.pipeline}{samples}"

    def check_used(self, step: int, action: Action) -> None:
        """Raises UserError if the bits of a microbatch, whose backward has run, have changed since its forward."""
        of_forward = turned(action.microbatch, self._job.slices)
        used = self._used.pop((action.pipeline, action.stage, of_forward), ())
        if used and self._job.check_pure and any(_mark(tensors) != mark for tensors, mark in used):
            difference = f"{named(self._number(action), action.pipeline, step)} was overwritten before its backward"
            raise UserError([impure_data(self._job.data, difference)])

    def marks_of(self, slot: Slot) -> LoadedMarks:
        """Returns the marks of the microbatches that were loaded for a slot in the open step."""
        return self._marks.get(slot, {})

    def forget_prepared(self) -> None:
        """Drops the microbatches of forwards that have not run."""
        self._prepared = {}

    def forget_step(self) -> None:
        """Drops all of the open step."""
        self._prepared, self._whole, self._marks, self._used = {}, {}, {}, {}

    def _loaded(self, step: int, action: Action) -> Batch:
        pipeline, stage, microbatch = action.pipeline, action.stage, self._number(action)
        batch = self._of_source(step, action)
        if is_due(self._job.audit, step, step == self._job.steps - 1) and microbatch < _MOST_MARKED:
            inputs, targets = _mark(batch.inputs), _mark(batch.targets)
            mark = inputs + targets
            first = self._marks.setdefault((pipeline, stage), {}).setdefault(microbatch, mark)
            if first != mark and self._job.check_pure:
                name, how = named(microbatch, pipeline, step), "when they are loaded again"
                raise UserError([another(self._job.data, name, (first, mark), how)])
            of_first, of_last = [(batch.inputs, inputs)], [(batch.targets, targets)]
            used = of_first * (stage == 0) + of_last * (stage == self._job.slots - 1)
            self._used[pipeline, stage, action.microbatch] = used
        return slice_of(batch, action.microbatch % self._job.slices, self._job.slices)


def on_device(batch: Batch, device: Device) -> Batch:
    """Returns a microbatch on a device."""
    return batch if device.is_host else Batch(device.put_all(batch.inputs), device.put_all(batch.targets))


def mark_of(batch: Batch) -> str:
    """Returns the mark of a microbatch: `MARK_DIGITS` of its inputs, then of its targets."""
    return _mark(batch.inputs) + _mark(batch.targets)


def _mark(tensors: Tensors) -> str:
    """Returns a mark of shapes and bits; quicker than a hash of state, because each microbatch of a step has two."""
    digest = hashlib.sha256()
    for tensor in tensors:
        plain = tensor.detach()
        plain = (plain if plain.layout is torch.strided else plain.to_dense()).contiguous()
        digest.update(f"{plain.shape}".encode())
        if plain.dtype not in _OF_NUMPY:
            plain = plain.resolve_conj().reshape(-1).view(torch.uint8)
        digest.update(plain.numpy().data)
    return digest.hexdigest()[:MARK_DIGITS]


# The trial of the data before training: a microbatch has the same bits in any order, at any time, in any process.
#
#     at first    microbatches 0 and 1 of step 0, which the layers are tried with
#     then        some of other steps and pipelines, and of the validation, in another order in each worker
#     at last     1 and 0 again, two seconds later by the clock; all that were loaded must still have their bits
#
# Before each call the random streams of the process have another position, in each worker another one. The part between
# ends early where a source is slow: the trial must not hold up the launch.

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
        calls = [*self._elsewhere(), *self._validation()]
        turn = self.worker % len(calls)  # workers differ in the order: a source that counts its calls gives itself away
        for name, load in (calls[turn:] + calls[:turn])[:: -1 if self.worker % 2 else 1]:
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
        # Of a stream, the trial reads two steps only.
        last_step = min(self.job.steps - 1, 1) if getattr(self.data, "is_stream", False) else self.job.steps - 1
        last_pipeline, last = self.job.pipelines - 1, self.job.microbatches - 1
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
