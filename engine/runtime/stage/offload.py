"""Residuals on the host: what autograd has saved of a microbatch is copied there, and back before the backward.

    OFFLOAD     saved tensors of the graphs, and those between layers -> memory of the host; the graphs stay
    RELOAD      the same storages on the device, under the same graphs
    OFFLOAD_W   likewise, between the parts of a backward, with the gradients that the part for the weights needs

Rules: a storage moves as a whole, so tensors that share it share it afterwards, at the same place in it. What others
may hold stays: weights, buffers, values of the value store, the output of the stage. Copies run beside computing: on a
GPU in streams of their own, between pinned memory and memory of the computing stream, which waits for events; on the
host in a thread for each direction. A residual that is away is this worker's: it dies with it. A function with a
backward of the user keeps its tensors.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from engine.core.action import FORWARD_OPS, Action, Op
from engine.core.errors import required
from engine.core.ownership import turned
from engine.core.program.dry_run import peak_stash, stash_of
from engine.core.value import Kind, Value
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
            tensor = torch.empty(0, dtype=self.dtype, device=memory.device)
            return tensor.set_(memory.untyped_storage(), self.offset, self.size, self.stride)


@dataclass(slots=True, weakref_slot=True)
class _Storages:
    """Storages as bytes: on the device, on the host, or both; hooks of graphs hold them, so they hold no graph."""

    here: list[Tensor] = field(default_factory=list)
    away: list[Tensor] = field(default_factory=list)


_Parts = tuple[Sequence[Segment], Sequence[Tensor], _Storages]


class _Offloaded:
    """Graphs and tensors without their memory; the hooks of graphs that were away before look into their `storages`."""

    def __init__(self, parts: _Parts, staying: Collection[int], device: Device):
        segments, others, storages = parts
        self.storages = storages
        self.left: _Moment | None = None
        self.back: _Moment | None = None
        self._device, self._staying = device, frozenset(staying)
        self._numbers = {memory.data_ptr(): number for number, memory in enumerate(storages.here)}
        self._between: list[tuple[Tensor, _View]] = []
        for segment in segments:
            self._take(segment)
        self._take_all(others)
        self._watched = [(StorageWeakRef(memory.untyped_storage()), memory.nbytes) for memory in storages.here]

    def _take(self, segment: Segment) -> None:
        for place in saved_places(segment):
            tensor = place.tensor
            if tensor is not None and (view := self._view(tensor)) is not None:
                storages = self.storages
                with contextlib.suppress(RuntimeError):  # it has hooks of the user, or of an earlier copy
                    place.raw.register_hooks(lambda _: None, lambda _, view=view, of=storages: view.of(of.here))
        self._take_all((*segment.inputs, *segment.outputs))

    def _take_all(self, tensors: Iterable[Tensor]) -> None:
        views = [(tensor, self._view(tensor)) for tensor in tensors if not tensor._is_view()]
        self._between += [(tensor, view) for tensor, view in views if view is not None]

    def _view(self, tensor: Tensor) -> _View | None:
        """Returns where a tensor lies, if its storage moves."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
            return None
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        if tensor.device != self._device.place or not address or address in self._staying:
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

    def settle(self) -> None:
        """Waits for the copy back; all is as it was."""
        self._wait(self.back)
        for tensor, view in self._between:
            tensor.data = view.of(self.storages.here)
        self.storages.away, self._between = [], []

    def _wait(self, moment: _Moment | None) -> None:
        if isinstance(moment, Future):
            moment.result()
        elif moment is not None:
            moment.before(self._device)


class ResidualOffloads:
    """The residuals of one worker that leave its device, and the room that they make."""

    def __init__(self, replicas: Replicas, values: ValueStore):
        self._replicas, self._values = replicas, values
        self._out, self._into = _Direction(replicas.device), _Direction(replicas.device)
        self._leaving: deque[Value] = deque()
        self._moved: dict[Value, _Offloaded] = {}
        self._hooked: WeakValueDictionary[Value, _Storages] = WeakValueDictionary()  # of graphs that are here again
        self._most = 0

    def enter(self, actions: Sequence[Action]) -> None:
        """Sets the limit of the next program: what `peak_stash` finds."""
        self._most = peak_stash(tuple(actions), self._num_here())

    def stashes(self) -> tuple[set[Value], set[Value]]:
        """Returns the residuals that are on the device, and those that are on the host or leave."""
        stages = self._replicas.stages.items()
        every = {Value(Kind.RESIDUAL, *slot, microbatch) for slot, stage in stages for microbatch in stage.residuals}
        every |= {Value(Kind.PENDING, *slot, microbatch) for slot, stage in stages for microbatch in stage.pending}
        away = {stash for stash in every if stash in self._moved and self._moved[stash].back is None}
        return every - away, away

    def around(self, method: Callable[[Action, int], None]) -> Callable[[Action, int], None]:
        """Returns an action that computes, with room for what it stashes, or with what it needs for the weights."""

        def run(action: Action, step: int) -> None:
            stash = stash_of(action._replace(op=Op.W) if action.op is Op.I else action)
            if stash in self._moved and action.op is Op.W:
                self._settle(stash)
            elif stash in self._moved:  # a recovery makes it again
                self._moved.pop(stash).await_copies()
                self._stage(stash).away.pop((stash.kind, stash.index), None)
                self._leaving = deque(each for each in self._leaving if each != stash)
            if action.op in FORWARD_OPS:
                self._make_room()
            method(action, step)

        return run

    def offload(self, action: Action, _step: int) -> None:
        """Starts copying a residual to the host; one that came from another worker has no graph yet, and stays."""
        stash = stash_of(action)
        stage, microbatch = self._stage(stash), stash.index
        if stash.kind is Kind.PENDING:
            pending, of_forward = stage.pending[microbatch], turned(microbatch, stage.slices)
            storages = self._hooked.get(stash._replace(kind=Kind.RESIDUAL, index=of_forward)) or _Storages()
            gradients = [gradient for _, _, of_outputs in pending for gradient in of_outputs]
            self._leave(stash, ([segment for _, segment, _ in pending], gradients, storages), ())
        elif (kept := stage.residuals[microbatch]).make is None:
            segments = [each for group in kept.groups if isinstance(group, list) for each in group]
            segments += [] if kept.loss is None else [kept.loss]
            inputs = [each for group in kept.groups if not isinstance(group, list) for each in group.inputs]
            self._leave(stash, (segments, inputs, _Storages()), kept.outputs)

            def make() -> Residual:
                self._settle(stash)
                if microbatch in stage.residuals:  # it was read, and may be used here after all
                    stage.residuals[microbatch] = kept
                return kept

            stage.residuals[microbatch] = Residual([], kept.outputs, make=make)

    def _leave(self, stash: Value, parts: _Parts, outputs: Sequence[Tensor]) -> None:
        stage = self._stage(stash)
        moved = self._moved[stash] = _Offloaded(parts, self._staying(stage, outputs), stage.device)
        moved.leave(self._out)
        self._leaving.append(stash)

    def reload(self, action: Action, _step: int) -> None:
        """Starts copying a residual back."""
        stash = stash_of(action)
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

    def _settle(self, stash: Value) -> None:
        if self._moved[stash].back is None:  # a recovery, or a hand-over, has other plans
            self._come(stash)
        moved = self._moved.pop(stash)
        moved.settle()
        self._hooked[stash] = moved.storages

    def _come(self, stash: Value) -> None:
        while stash in self._leaving:
            self._let_go()
        replica = self._stage(stash)
        replica.away.pop((stash.kind, stash.index), None)
        replica.peak_stash = max(replica.peak_stash, replica.num_stashed)
        self._moved[stash].come(self._into)

    def _make_room(self) -> None:
        while self._leaving and self._num_here() >= self._most:
            self._let_go()

    def _let_go(self) -> None:
        stash = self._leaving.popleft()
        self._stage(stash).away[stash.kind, stash.index] = self._moved[stash].let_go()

    def _num_here(self) -> int:
        return sum(stage.num_stashed for stage in self._replicas.stages.values())

    def _stage(self, stash: Value) -> Stage:
        return self._replicas.stages[stash.pipeline, stash.stage]

    def _staying(self, stage: Stage, outputs: Sequence[Tensor]) -> set[int]:
        kept = [*stage.buffers(), *outputs, *(p for layer in stage.layers.values() for p in layer.parameters())]
        for _, tensors, _ in self._values.held():
            kept += tensors_of(tensors)
        return {tensor.untyped_storage().data_ptr() for tensor in kept}
