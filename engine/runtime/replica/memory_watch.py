"""The memory of a worker's GPU: told for each step in which it was another one than before, with a prediction for it.

Rules: before training each stage here is tried with two microbatches, which leave no trace; so a prediction knows what
a microbatch takes on this device. The memory of the host is neither tried nor told.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from engine.core.action import Action
from engine.core.analysis.device_memory import device_bytes
from engine.core.analysis.memory_model import MicrobatchBytes, StageBytes
from engine.core.history.memory_records import MemoryRecord
from engine.core.ownership import Ownership
from engine.models.data import Data
from engine.models.layers import Batch, Tensors
from engine.runtime.replica.replicas import Replicas
from engine.runtime.stage.random_streams import set_back
from engine.runtime.stage.stage_bytes import microbatch_bytes, stage_bytes
from engine.runtime.transport.tensor_spec import Border

_SAME = 0.01  # of the bytes that were told last


class MemoryWatch:
    """Looks at the most bytes that a worker held since its last look; `borders` has those of all stages."""

    def __init__(
        self, worker: int, replicas: Replicas, borders: Sequence[Border], write: Callable[[MemoryRecord], None]
    ):
        self._worker, self._replicas, self._borders, self._write = worker, replicas, borders, write
        self._tried: dict[int, MicrobatchBytes] = {}
        self._told = (0, 0)

    def begin(self, data: Data) -> None:
        """Tries the stages here, and forgets the most bytes so far."""
        if self._replicas.device.is_host:
            return
        for (_, index), stage in self._replicas.stages.items():
            with contextlib.suppress(Exception), set_back(self._replicas.device):  # of a layer: training will show it
                batch = Batch((), ())
                if index == 0 or stage.is_last:
                    batch = data.microbatch(0, 0, 0, self._replicas.job.microbatch_size)
                targets = self._replicas.device.put_all(batch.targets) if stage.is_last else None
                self._tried[index] = microbatch_bytes(stage, self._inputs(index, batch), targets)
        self._replicas.device.memory_peak()

    def _inputs(self, index: int, batch: Batch) -> Tensors:
        device = self._replicas.device
        return tuple(spec.zeros(device) for spec in self._borders[index - 1]) if index else device.put_all(batch.inputs)

    def step_ends(self, step: int, ownership: Ownership, actions: Callable[[], Sequence[Action]]) -> None:
        """Tells the most bytes of a step, if they differ from those that were told last.

        `actions` returns those of this worker in a usual step of the owners.
        """
        peak = self._replicas.device.memory_peak()
        if peak is None or not any(abs(now - told) > _SAME * told for now, told in zip(peak, self._told, strict=True)):
            return
        self._told = allocated, reserved = peak
        predicted = self._predicted(ownership, actions())
        self._write(MemoryRecord(step=step, allocated=allocated, reserved=reserved, predicted=predicted))

    def _predicted(self, ownership: Ownership, actions: Sequence[Action]) -> int:
        """Returns the prediction; 0 if a stage was not tried here, as that of a later replica."""
        held = {stage for _, stage in ownership.held_by(self._worker)}
        if not held <= self._tried.keys():
            return 0
        sizes = {
            index: StageBytes(0, 0, 0, 0, 0, sum(spec.num_bytes for spec in border))
            for index, border in enumerate(self._borders)
        }
        sizes |= {index: stage_bytes(stage) for (_, index), stage in self._replicas.stages.items()}
        return device_bytes(self._replicas.job, actions, ownership, self._worker, sizes, self._tried)
