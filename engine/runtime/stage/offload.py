"""Residuals on the host: what autograd has saved of a microbatch is copied there, and back before the backward.

    OFFLOAD   saved tensors of the graphs, and those between layers -> memory of the host; the graphs stay
    RELOAD    the same storages on the device, under the same graphs

Rules: a storage moves as a whole, so tensors that share it share it afterwards, at the same place in it. What others
may hold stays: weights, buffers, values of the value store, the output of the stage. Copies run beside computing: on a
GPU in streams of their own, between pinned memory and memory of the computing stream, which waits for events; on the
host in a thread for each direction. A residual that is away is this worker's: it dies with it. A function with a
backward of the user keeps its tensors.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.core.action import Action
from engine.core.errors import required
from engine.core.program.dry_run import peak_stash
from engine.core.program.offload import Stash
from engine.runtime.device.copies import tensors_of
from engine.runtime.device.device import Device
from engine.runtime.device.side_queue import QueueMoment, SideQueue, moment_now
from engine.runtime.stage.replicas import Replicas, ValueStore
from engine.runtime.stage.residuals import saved_places
from engine.runtime.stage.stage import Residual, Segment, Stage

_Moment = QueueMoment | Future[None]


class _Direction:
    """The copies of one direction, one after the other."""

    def __init__(self, device: Device):
        self._device = device
        self._queue = None if device.is_host else SideQueue(device)
        self._thread = ThreadPoolExecutor(1) if device.is_host else None
        self._took: list[tuple[int, int]] = []  # bytes and nanoseconds
        self._moments: list[tuple[int, QueueMoment, QueueMoment]] = []  # bytes, begin and end

    def copy(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: _Moment | None) -> _Moment:
        """Starts copies, once the work enqueued so far is done and `after` has come; returns when they are over."""
        if self._thread is not None:
            return self._thread.submit(self._copy_timed, targets, sources, after)
        queue = required(self._queue, "a GPU has queues")
        queue.behind(moment_now(self._device))
        if isinstance(after, QueueMoment):
            queue.behind(after)
        begin = queue.moment()
        with queue.given():
            num_bytes = _copy(targets, sources)
        self._moments.append((num_bytes, begin, end := queue.moment()))
        return end

    def _copy_timed(self, targets: Sequence[Tensor], sources: Sequence[Tensor], after: _Moment | None) -> None:
        if isinstance(after, Future):
            after.result()
        start_ns = time.monotonic_ns()
        self._took.append((_copy(targets, sources), time.monotonic_ns() - start_ns))

    def times(self) -> list[tuple[int, int]]:
        """Returns the bytes and the nanoseconds of the copies since the last call that are over."""
        over = [each for each in self._moments if each[2].has_come()]
        took = [*self._took, *((num_bytes, begin.ns_until(end)) for num_bytes, begin, end in over)]
        self._took, self._moments = [], []
        return took


def _copy(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> int:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source, non_blocking=True)
    return sum(source.nbytes for source in sources)


class _View(NamedTuple):
    """A tensor in a storage."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def of(self, storages: Sequence[Tensor]) -> Tensor:
        """Returns the tensor in these storages, which are given as bytes."""
        memory = storages[self.storage]
        with torch.no_grad():
            return torch.empty(0, dtype=self.dtype, device=memory.device).set_(
                memory.untyped_storage(), self.offset, self.size, self.stride
            )


@dataclass(slots=True)
class _Storages:
    """Storages as bytes: on the device, on the host, or both; hooks of graphs hold them, so they hold no graph."""

    here: list[Tensor] = field(default_factory=list)
    away: list[Tensor] = field(default_factory=list)


class _OffloadedResidual:
    """A residual without its tensors; `step` by step: leaves, has left, comes back, is here."""

    def __init__(self, residual: Residual, staying: Collection[int], device: Device):
        self.residual = residual
        self.storages = _Storages()
        self.left: _Moment | None = None
        self.back: _Moment | None = None
        self._device, self._staying = device, frozenset(staying)
        self._numbers: dict[int, int] = {}
        self._between: list[tuple[Tensor, _View]] = []
        for segment in _segments(residual):
            self._take(segment)
        for group in residual.groups:
            for tensor in () if isinstance(group, list) else group.inputs:
                self._take_tensor(tensor)
        self._watched: list[tuple[StorageWeakRef, int]] = [
            (StorageWeakRef(memory.untyped_storage()), memory.nbytes) for memory in self.storages.here
        ]

    def _take(self, segment: Segment) -> None:
        for place in saved_places(segment):
            tensor = place.tensor
            if tensor is not None and (view := self._view(tensor)) is not None:
                storages = self.storages
                try:
                    place.raw.register_hooks(lambda _: None, lambda _, view=view, of=storages: view.of(of.here))
                except RuntimeError:  # it has hooks of the user
                    continue
        for tensor in (*segment.inputs, *segment.outputs):
            self._take_tensor(tensor)

    def _take_tensor(self, tensor: Tensor) -> None:
        if not tensor._is_view() and (view := self._view(tensor)) is not None:
            self._between.append((tensor, view))

    def _view(self, tensor: Tensor) -> _View | None:
        """Returns where a tensor lies, if its storage moves."""
        is_plain = (
            type(tensor) is Tensor and tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg())
        )
        if not is_plain or tensor.device != self._device.place:
            return None
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if not address or address in self._staying:
            return None
        if address not in self._numbers:
            memory = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage, 0, (storage.nbytes(),), (1,))
            self._numbers[address] = len(self.storages.here)
            self.storages.here.append(memory)
        number = self._numbers[address]
        return _View(number, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def leave(self, out: _Direction) -> None:
        """Starts the copy to the host."""
        room = self._device.copies.room
        self.storages.away = [room((memory.nbytes,), torch.uint8) for memory in self.storages.here]
        self.left = out.copy(self.storages.away, self.storages.here, None)

    def let_go(self) -> int:
        """Waits for the copy to the host, frees the memory of the device and returns how many bytes it was."""
        self._wait(self.left)
        for tensor, view in self._between:
            tensor.data = torch.empty(0, dtype=view.dtype, device=tensor.device)
        self.storages.here = []
        return sum(num_bytes for storage, num_bytes in self._watched if storage.expired())

    def come(self, into: _Direction) -> None:
        """Starts the copy back."""
        place = self._device.place
        self.storages.here = [torch.empty(each.nbytes, dtype=torch.uint8, device=place) for each in self.storages.away]
        self.back = into.copy(self.storages.here, self.storages.away, self.left)

    def await_copies(self) -> None:
        """Waits for all copies, whose memory is free when this goes."""
        self._wait(self.left)
        self._wait(self.back)

    def settle(self) -> Residual:
        """Waits for the copy back, and returns the residual as it was."""
        self._wait(self.back)
        for tensor, view in self._between:
            tensor.data = view.of(self.storages.here)
        self.storages.away, self._between = [], []
        return self.residual

    def _wait(self, moment: _Moment | None) -> None:
        if isinstance(moment, Future):
            moment.result()
        elif moment is not None:
            moment.before(self._device)


def _segments(residual: Residual) -> Iterator[Segment]:
    for group in residual.groups:
        if isinstance(group, list):
            yield from group
    if residual.loss is not None:
        yield residual.loss


class ResidualOffloads:
    """The residuals of one worker that leave its device, and the room that they make."""

    def __init__(self, replicas: Replicas, values: ValueStore):
        self._replicas, self._values = replicas, values
        self._out, self._into = _Direction(replicas.device), _Direction(replicas.device)
        self._leaving: deque[Stash] = deque()
        self._moved: dict[Stash, _OffloadedResidual] = {}
        self._most = 0

    def enter(self, actions: Sequence[Action]) -> None:
        """Sets the limit of the next program: what `peak_stash` finds."""
        self._most = peak_stash(tuple(actions), self._num_here())

    def stashes(self) -> tuple[set[Stash], set[Stash]]:
        """Returns the residuals that are on the device, and those that are on the host or leave."""
        stages = self._replicas.stages.items()
        every = {(*slot, microbatch) for slot, stage in stages for microbatch in stage.residuals}
        away = {stash for stash in every if stash in self._moved and self._moved[stash].back is None}
        return every - away, away

    def with_room(self, method: Callable[[Action, int], None]) -> Callable[[Action, int], None]:
        """Returns a forward that waits until there is room for its residual."""

        def forward(action: Action, step: int) -> None:
            stash, stage = self._at(action)
            if stash in self._moved:  # a recovery makes it again
                self._moved.pop(stash).await_copies()
                stage.away.pop(action.microbatch, None)
                self._leaving = deque(each for each in self._leaving if each != stash)
            self._make_room()
            method(action, step)

        return forward

    def offload(self, action: Action, _step: int) -> None:
        """Starts copying a residual to the host; one that came from another worker has no graph yet, and stays."""
        stash, stage = self._at(action)
        residual = stage.residuals[action.microbatch]
        if residual.make is None:
            moved = self._moved[stash] = _OffloadedResidual(residual, self._staying(stage, residual), stage.device)
            stage.residuals[action.microbatch] = Residual([], residual.outputs, make=lambda: self._settled(stash))
            moved.leave(self._out)
            self._leaving.append(stash)

    def reload(self, action: Action, _step: int) -> None:
        """Starts copying a residual back."""
        stash, _ = self._at(action)
        if stash in self._moved and self._moved[stash].back is None:
            self._make_room()
            self._come(stash)

    def copy_times(self) -> list[tuple[int, int]]:
        """Returns the bytes and the nanoseconds of the copies since the last call."""
        return [*self._out.times(), *self._into.times()]

    def clear(self) -> None:
        """Forgets all residuals, at the end of a step."""
        self._leaving.clear()
        while self._moved:
            self._moved.popitem()[1].await_copies()

    def _settled(self, stash: Stash) -> Residual:
        if self._moved[stash].back is None:  # a recovery, or a hand-over, has other plans
            self._come(stash)
        residual, (pipeline, stage, microbatch) = self._moved.pop(stash).settle(), stash
        residuals = self._replicas.stages[pipeline, stage].residuals
        if microbatch in residuals:  # it was read in order to send it, and may be used here after all
            residuals[microbatch] = residual
        return residual

    def _come(self, stash: Stash) -> None:
        while stash in self._leaving:
            self._let_go()
        pipeline, stage, microbatch = stash
        replica = self._replicas.stages[pipeline, stage]
        replica.away.pop(microbatch, None)
        replica.peak_stash = max(replica.peak_stash, replica.num_stashed)
        self._moved[stash].come(self._into)

    def _make_room(self) -> None:
        while self._leaving and self._num_here() >= self._most:
            self._let_go()

    def _let_go(self) -> None:
        pipeline, stage, microbatch = stash = self._leaving.popleft()
        self._replicas.stages[pipeline, stage].away[microbatch] = self._moved[stash].let_go()

    def _num_here(self) -> int:
        return sum(stage.num_stashed for stage in self._replicas.stages.values())

    def _at(self, action: Action) -> tuple[Stash, Stage]:
        stage, _, microbatch, pipeline = action
        return (pipeline, stage, microbatch), self._replicas.stages[pipeline, stage]

    def _staying(self, stage: Stage, residual: Residual) -> set[int]:
        kept = [
            *stage.buffers(),
            *residual.outputs,
            *(p for layer in stage.layers.values() for p in layer.parameters()),
        ]
        for _, tensors, _ in self._values.held():
            kept += tensors_of(tensors)
        return {tensor.untyped_storage().data_ptr() for tensor in kept}
