"""The census of a worker's tensors by slot and kind, after each action of the first steps of a program.

Rules: it reads what replicas, stash and log hold, and changes nothing. The first step of all has no moments yet, so two
steps are counted; the steps after them hold the same. A residual has the size that the trial of its layers found. See
`engine.core.job.memory_model` for the kinds and what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from engine.core.history.run_records import TensorsRecord
from engine.core.job.memory_model import BySlot, TensorBytes, residual_of
from engine.core.ownership import Slot
from engine.core.value import Kind, Value
from engine.runtime.device.copies import tensors_of
from engine.runtime.stage.gradient_log import LogEntry
from engine.runtime.stage.memory_watch import num_bytes
from engine.runtime.stage.replicas import Replicas, ValueStore
from engine.runtime.stage.stage import Stage

Entries = Callable[[], Iterable[tuple[Slot, LogEntry]]]
_STEPS = 2  # of a program


class TensorCensus:
    """The tensors of one worker; `entries` returns the means and log entries of the open step."""

    def __init__(
        self, replicas: Replicas, values: ValueStore, entries: Entries, write: Callable[[TensorsRecord], None]
    ):
        self._replicas, self._values, self._entries, self._write = replicas, values, entries, write
        self._left, self._most, self._total = 0, BySlot(), 0
        self._own: Collection[Slot] = ()
        self._told: tuple[BySlot, BySlot] = {}, {}

    def enter(self, own: Collection[Slot]) -> None:
        """Begins to count: another program follows, with these slots of this worker."""
        self._own = own
        self._left = _STEPS
        self._most, self._total = {}, 0

    def look(self) -> None:
        """Counts what is there after an action."""
        if self._left:
            now = self.count()
            if (total := sum(map(sum, now.values()))) > self._total:
                self._most, self._total = now, total

    def end_step(self, step: int) -> None:
        """Records the peak of a step, and what is there at its boundary, if they are others than before."""
        if not self._left:
            return
        told = self.count(), self._most
        if told != self._told:
            self._told = told
            boundary, peak = (tuple((*slot, *of) for slot, of in sorted(each.items())) for each in told)
            self._write(TensorsRecord(step=step, boundary=boundary, peak=peak))
        self._left, self._most, self._total = self._left - 1, {}, 0

    def count(self) -> BySlot:
        """Returns the bytes of the tensors that are here now."""
        stages = self._replicas.stages
        held = {slot: self._of_stage(stage) for slot, stage in stages.items()}
        for value, tensors, stays in self._values.held():
            slot = self._slot_of(value)
            if slot is not None and not _is_in_stash(value, stages.get((value.pipeline, value.stage))):
                size = num_bytes(tensors_of(tensors))
                held[slot] = held[slot].plus(TensorBytes(retained=size) if stays else TensorBytes(transfer=size))
        counted = {
            each.grad.data_ptr() for stage in stages.values() for each in stage.trained() if each.grad is not None
        }
        for slot, entry in self._entries():
            for gradient in (each for named in entry.gradients.values() for each in named.values()):
                if gradient.data_ptr() not in counted and slot in held:
                    counted.add(gradient.data_ptr())
                    held[slot] = held[slot].plus(TensorBytes(transfer=gradient.nbytes))
        return held

    def _of_stage(self, stage: Stage) -> TensorBytes:
        optimizers = stage.optimizers.values()
        weights = {each.data_ptr(): each for one in optimizers for each in one.kept.values()}
        if self._replicas.job.fsdp:
            whole = (each for layer in stage.layers.values() for each in layer.parameters())
            weights |= {each.data_ptr(): each for each in whole if each.untyped_storage().nbytes()}
        moments = (state for each in optimizers for named in each.state.values() for state in named.values())
        boundary = {each.data_ptr(): each for buffers in stage.boundary for each in buffers}
        return TensorBytes(
            weights=num_bytes(weights.values()),
            moments=num_bytes(moments),
            buffers=num_bytes(stage.buffers()) + num_bytes(boundary.values()),
            stash=(len(stage.residuals) + len(stage.pending)) * self.residual(stage),
            accumulators=num_bytes(each.grad for each in stage.trained() if each.grad is not None),
        )

    def residual(self, stage: Stage) -> int:
        """Returns the bytes of one microbatch in the stash of a stage."""
        layers, found = list(stage.layers), self._replicas.residuals
        return residual_of(stage.job, layers, {layer: size for layer, (size, _) in found.items()}) + (
            found[layers[0]][1] if layers[0] in found else 0
        )

    def _slot_of(self, value: Value) -> Slot | None:
        """Returns the slot that a value is here for: the own one that takes it, else the own one that made it."""
        further = 1 if value.kind is Kind.ACTIVATION else -1
        near = ((value.pipeline, value.stage + further), (value.pipeline, value.stage))
        return next((slot for slot in near if slot in self._own), next(filter(self._replicas.stages.get, near), None))


def _is_in_stash(value: Value, stage: Stage | None) -> bool:
    """Returns whether a residual of the stage that made a value has it too."""
    return stage is not None and value.kind is Kind.ACTIVATION and value.index in stage.residuals
