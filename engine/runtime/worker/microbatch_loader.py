"""The microbatches that a worker loads in training, and their marks in a step with an audit.

A slow source that draws from no stream of the process loads the microbatches of the next forwards ahead, in threads.

Rules: a mark is taken from the whole microbatch as soon as it is loaded. The part that was used must have the same bits
after its backward, because a layer keeps its inputs until then.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch

from engine.core.action import Action
from engine.core.checks.loaded_data import LoadedMarks, another, impure_data, named
from engine.core.checks.trajectory import MARK_DIGITS
from engine.core.config.job import Job, is_due
from engine.core.errors import UserError
from engine.core.ownership import Slot
from engine.core.texts import numbered
from engine.models.data import Data
from engine.models.layers import Batch, Tensors
from engine.models.sources.indexed_data import samples_of
from engine.runtime.device.device import HOST, Device
from engine.runtime.worker.watched_data import WatchedData

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
        self._forwards: Sequence[Action] = ()  # with data, of one step
        self._marks: dict[Slot, dict[int, str]] = {}  # of the open step
        self._used: dict[_Key, list[tuple[Tensors, str]]] = {}  # the parts in use and their marks, until the backward

    def load(self, step: int, action: Action) -> Batch:
        """Returns the microbatch of a forward on the device.

        Raises UserError if it was loaded with other bits before.
        """
        batch = self._prepared.pop(action, None) or self._loaded(step, action)
        self._load_ahead(step, action)
        return on_device(batch, self._device)

    def enter(self, forwards: Sequence[Action]) -> None:
        """Takes the forwards with data of the next program, in their order."""
        self.forget_prepared()
        for each in self._ahead.values():
            each.cancel()
        self._forwards, self._ahead = forwards, {}

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
            is_there = (at_step, following) in self._ahead or following in self._prepared
            if self._threads is None or is_there or at_step >= self._job.steps:
                continue
            at = (at_step, following.pipeline, following.microbatch, self._job.microbatch_size)
            self._ahead[at_step, following] = self._threads.submit(data.microbatch_ahead, *at)

    def _of_source(self, step: int, action: Action) -> Batch:
        ahead, data = self._ahead.pop((step, action), None), self._data
        if ahead is not None and isinstance(data, WatchedData):
            return data.await_ahead(ahead.result)
        return data.microbatch(step, action.pipeline, action.microbatch, self._job.microbatch_size)

    def prepare(self, step: int, action: Action) -> None:
        """Loads the microbatch of a later forward."""
        if action not in self._prepared:
            self._prepared[action] = self._loaded(step, action)

    def told(self, step: int, action: Action) -> str:
        """Returns the microbatch of an action in words, with the numbers of its first samples in a finite data set."""
        numbers = samples_of(self._data, step, action.pipeline, action.microbatch)
        first = [*numbers[:_MOST_TOLD], *["..."] * (len(numbers) > _MOST_TOLD)]
        samples = f" ({numbered('sample', first)})" if first else ""
        return f"microbatch {action.microbatch} of pipeline {action.pipeline}{samples}"

    def check_used(self, step: int, action: Action) -> None:
        """Raises UserError if the bits of a microbatch, whose backward has run, have changed since its forward."""
        used = self._used.pop((action.pipeline, action.stage, action.microbatch), ())
        if self._job.check_pure and any(_mark(tensors) != mark for tensors, mark in used):
            found = f"{named(action.microbatch, action.pipeline, step)} was overwritten before its backward"
            raise UserError([impure_data(self._job.data, found)])

    def marks_of(self, slot: Slot) -> LoadedMarks:
        """Returns the marks of the microbatches that were loaded for a slot in the open step."""
        return self._marks.get(slot, {})

    def forget_prepared(self) -> None:
        """Drops the microbatches of forwards that have not run."""
        self._prepared = {}

    def forget_step(self) -> None:
        """Drops all of the open step."""
        self._prepared, self._marks, self._used = {}, {}, {}

    def _loaded(self, step: int, action: Action) -> Batch:
        pipeline, stage, microbatch = action.pipeline, action.stage, action.microbatch
        batch = self._of_source(step, action)
        if is_due(self._job.audit, step, step == self._job.steps - 1) and microbatch < _MOST_MARKED:
            inputs, targets = _mark(batch.inputs), _mark(batch.targets)
            mark = inputs + targets
            known = self._marks.setdefault((pipeline, stage), {}).setdefault(microbatch, mark)
            if known != mark and self._job.check_pure:
                name, how = named(microbatch, pipeline, step), "when they are loaded again"
                raise UserError([another(self._job.data, name, (known, mark), how)])
            of_first, of_last = [(batch.inputs, inputs)], [(batch.targets, targets)]
            used = of_first * (stage == 0) + of_last * (stage == self._job.slots - 1)
            self._used[pipeline, stage, microbatch] = used
        return batch


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
