"""Writes a worker's share of checkpoints: a thread copies it, then writes it while training continues.

    Keep --> a thread copies -------> then writes, hashes and syncs, after the previous thread --> KeptMessages
             the next step waits      training continues; at the end of the job the worker waits

Rules: there are at most two copies in memory, one being written and one waiting. A third waits for room, and the next
step with it, but no longer than `_ROOM_S`; then this checkpoint is dropped, and no other one waits until the disk has
written one. If checkpoints are frequent, the memory of a copy is reused. No error here ends the training.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from engine.core.checkpoint_rules import KeptMessage, StateShare, UnkeptMessage
from engine.core.errors import StorageError
from engine.core.ownership import Slot
from engine.core.protocol.worker_state import Keep
from engine.files.checkpoint_disk import DiskTroubles
from engine.files.checkpoint_folder import checkpoints_at
from engine.runtime.checkpoint.loader import LayerImage, laid_out
from engine.runtime.device.device import Device
from engine.runtime.process.control import Control
from engine.runtime.stage.buffers import named_copies
from engine.runtime.stage.optimizer import LayerOptimizer
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import Stage


class StateDictNames(NamedTuple):
    """How the names in a layer's state_dict differ from those in a checkpoint: buffers left out, and further names."""

    transient: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]


def state_dict_names(layer: nn.Module) -> StateDictNames:
    """Returns the buffers that are not persistent, and each further name of a tensor with its name in a checkpoint."""
    stored = layer.state_dict(keep_vars=True)
    buffers = list(layer.named_buffers())
    first = {id(tensor): f"weight/{name}" for name, tensor in layer.named_parameters()}
    first |= {id(tensor): f"buffer/0/{name}" for name, tensor in buffers}
    names = ((name, first.get(id(tensor), "")) for name, tensor in stored.items())
    return StateDictNames(
        tuple(name for name, _ in buffers if name not in stored),
        tuple((name, first_name) for name, first_name in names if first_name and not first_name.endswith(f"/{name}")),
    )


# The state of a worker's share of a checkpoint: the tensors of each layer at a step boundary, and a copy of them.
#
# Rules: the weights and the optimizer state change in place, but only with the next step, so the copy may run during
# the open step. If a worker can take over, every replica has copies of the buffers at the boundary, which no forward
# changes. Otherwise the buffers are live, and are copied at once.

NamedTensors = list[tuple[str, Tensor]]


@dataclass(frozen=True, slots=True)
class LayerState:
    """The tensors of a layer or shard by name; the next step changes `live`, not `fixed`. See `StateDictNames`."""

    layer: int
    shard: int
    shards: int
    live: NamedTensors
    fixed: NamedTensors
    transient: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]

    def copied(self, image: LayerImage | None = None) -> LayerImage:
        """Returns a copy of the state, in the image of an older step if that fits."""
        tensors = [*self.fixed, *self.live]
        if image is None or not image.takes(tensors):
            image = LayerImage(tensors)
        image.fill(tensors)
        return image


def state_of(share: StateShare, stages: Mapping[Slot, Stage]) -> Iterator[LayerState]:
    """Yields the state of each layer of a share, from the replicas of a worker at a step boundary."""
    stage = stages[share.slot]
    buffers = _buffers_of(stage, stages, share.slot[1])
    for index, layer in stage.layers.items():
        named = [
            (f"buffer/{pipeline}/{name}", tensor)
            for pipeline, by_layer in buffers.items()
            for name, tensor in by_layer[index]
        ]
        live = list(_own_tensors(stage.optimizers[index]))
        yield LayerState(index, share.shard, share.shards, live, named, *state_dict_names(layer))


def _own_tensors(optimizer: LayerOptimizer) -> Iterator[tuple[str, Tensor]]:
    for name, weight in optimizer.kept.items():
        yield f"weight/{name}", weight.detach()
    for name, named in optimizer.state.items():
        for key, tensor in named.items():
            yield f"optimizer/{name}/{key}", tensor


def _buffers_of(stage: Stage, stages: Mapping[Slot, Stage], index: int) -> dict[int, dict[int, NamedTensors]]:
    """Returns the buffers of each pipeline by layer: those of the boundary, or copies if there are none."""
    if stage.boundary:
        return {pipeline: named_copies(stage.layers, copies) for pipeline, copies in enumerate(stage.boundary)}
    return {
        pipeline: {at: copies_of(list(layer.named_buffers())) for at, layer in replica.layers.items()}
        for (pipeline, other), replica in sorted(stages.items())
        if other == index
    }


def copies_of(named: NamedTensors) -> NamedTensors:
    """Returns copies of tensors, with their strides."""
    with torch.no_grad():
        pairs = [(torch.empty_like(tensor, requires_grad=False), tensor) for _, tensor in named]
        dense = [(copy, tensor) for copy, tensor in pairs if copy.stride() == tensor.stride()]
        if dense:  # one call, so other threads can run Python meanwhile
            torch._foreach_copy_([copy for copy, _ in dense], [tensor for _, tensor in dense])
        return [
            (name, copy if copy.stride() == tensor.stride() else laid_out(tensor, tensor.stride()))
            for (name, _), (copy, tensor) in zip(named, pairs, strict=True)
        ]


_ROOM_S = 30.0  # less than the time after which waiting workers count as a lost message
_OFTEN_S = 10.0  # between checkpoints: below this, the memory of a copy is reused
END_S = 60.0  # how long a worker that has finished waits for its writes


class _Ends(NamedTuple):
    """The events at which one checkpoint is copied and written, or given up; no other checkpoint sets them."""

    copied: threading.Event
    written: threading.Event


class CheckpointWriter:
    """Writes the shares of one worker to `place`, a folder or a URL, and reports to the agent."""

    def __init__(self, control: Control, replicas: Replicas, place: str, run: str = ""):
        self._control = control
        self._replicas = replicas
        self.troubles = DiskTroubles()  # faults of the disk, which a scenario adds
        self._folder = checkpoints_at(place, troubles=self.troubles, run=run)
        self._room = threading.Semaphore(2)
        self._is_failing = False  # a checkpoint has failed or found no room, and none has been written since
        self._last = _Ends(threading.Event(), threading.Event())  # of the latest checkpoint
        for end in self._last:
            end.set()
        self._spare: dict[tuple[int, int], LayerImage] = {}  # by layer and shard, of a checkpoint that is written
        self._began_s = -_OFTEN_S
        self._is_often = False
        self._num_open = 0
        self._count = threading.Lock()

    def keep(self, order: Keep, position: str = "") -> None:
        """Starts copying and writing the state after a step, and the position of the data set behind it."""
        self.join_copy()
        now_s = time.monotonic()
        self._is_often, self._began_s = now_s - self._began_s < _OFTEN_S, now_s
        stages = self._replicas.stages
        states = [state for share in order.shares for state in state_of(share, stages)]
        self._open(1)
        before, self._last = self._last, _Ends(threading.Event(), threading.Event())
        devices = [stages[share.slot].device for share in order.shares]
        args = (devices, order.step, states, before.written, self._last, position)
        threading.Thread(target=self._write, args=args, name="checkpoint", daemon=True).start()

    @property
    def is_copied(self) -> bool:
        """Whether the copy is complete."""
        return self._last.copied.is_set()

    def join_copy(self) -> None:
        """Waits until the copy is complete: from then on the state may change."""
        self._last.copied.wait()

    def join_writes(self) -> None:
        """Waits until everything is written, at most `END_S`; raises Stopped or Fenced."""
        until_s = time.monotonic() + END_S
        alarm = threading.Timer(END_S, self._control.wake)
        alarm.daemon = True
        if self._num_open:
            alarm.start()
        try:
            self._control.wait_until(lambda: True if not self._num_open or time.monotonic() >= until_s else None)
        finally:
            alarm.cancel()

    def await_writes(self) -> None:
        """Waits until everything is written, at most `END_S`, whatever the agent says meanwhile."""
        self._last.written.wait(END_S)

    def _write(
        self,
        devices: Iterable[Device],
        step: int,
        states: list[LayerState],
        before: threading.Event,
        ends: _Ends,
        position: str,
    ) -> None:
        """Copies one checkpoint, and writes it after the older one (`before`), which a newer one would replace."""
        try:
            for device in devices:
                device.enter()
            with self._given_room():
                copied, copy_ns = self._copy(states, ends)
                before.wait()
                while copied:
                    state, image = copied.pop(0)
                    self._write_part(step, state, image, copy_ns, position)
                    copy_ns = 0
                    if self._is_often:
                        self._spare[state.layer, state.shard] = image
        except Exception as error:  # training continues
            with contextlib.suppress(OSError):  # a worker that is a thread may have ended
                self._control.send(UnkeptMessage(step, str(error) or repr(error)))
        finally:
            if not ends.copied.is_set():  # nothing of it is written: the next one follows the older one
                self._last = ends._replace(written=before)
                ends.copied.set()
            self._open(-1)
            self._control.wake()
            ends.written.set()

    @contextlib.contextmanager
    def _given_room(self) -> Iterator[None]:
        if not self._room.acquire(timeout=0 if self._is_failing else _ROOM_S):
            self._is_failing = True
            raise StorageError(f"the two checkpoints before it were not written within {_ROOM_S:g} s")
        try:
            yield
            self._is_failing = False
        except Exception:
            self._is_failing = True
            raise
        finally:
            self._room.release()

    def _copy(self, states: Iterable[LayerState], ends: _Ends) -> tuple[list[tuple[LayerState, LayerImage]], int]:
        start_ns = time.monotonic_ns()
        copied = [(state, state.copied(self._spare.pop((state.layer, state.shard), None))) for state in states]
        self._spare.clear()  # of layers that another worker writes by now
        ends.copied.set()
        return copied, time.monotonic_ns() - start_ns

    def _write_part(self, step: int, state: LayerState, image: LayerImage, copy_ns: int, position: str) -> None:
        began_ns = written_ns = time.monotonic_ns()

        def chunks() -> Iterator[memoryview]:
            nonlocal written_ns
            yield image.data
            written_ns = time.monotonic_ns()  # the last chunk is written once the next one is requested

        part = self._folder.write_part(
            step,
            state.layer,
            chunks(),
            shard=state.shard,
            shards=state.shards,
            strides=image.strides,
            transient=state.transient,
            aliases=state.aliases,
            position=position if (state.layer, state.shard) == (0, 0) else "",
        )
        sync_ns = time.monotonic_ns() - written_ns
        self._control.send(KeptMessage(step, part, copy_ns, written_ns - began_ns, sync_ns))

    def _open(self, more: int) -> None:
        with self._count:
            self._num_open += more
