"""The census of a worker's tensors by slot and kind, after each action of the first steps of a program.

Rules: it reads what replicas, stash and log hold, and changes nothing. The first step of all has no moments yet, so two
steps are counted; the steps after them hold the same. A step that begins again, after a fence, is not counted: others
wait for its replay. Weights, moments and buffers are counted at a boundary: inside a
step they change with fsdp only. A residual has the size that the trial of its layers found. See
`engine.core.job.tensor_model` for the kinds and what is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch import Tensor

from engine.core.history.run_records import TensorsRecord
from engine.core.job.tensor_model import BySlot, TensorBytes, residual_of
from engine.core.ownership import Slot
from engine.core.value import Kind, Value
from engine.runtime.device.copies import tensors_of
from engine.runtime.stage.gradient_log import GradientStreams, LogEntry
from engine.runtime.stage.memory_watch import num_bytes
from engine.runtime.stage.replicas import Replicas, ValueStore
from engine.runtime.stage.stage import Stage

Entries = Callable[[], Iterable[tuple[Slot, LogEntry]]]
_STEPS = 2  # of a program


class TensorCensus:
    """The tensors of one worker; `entries` returns the means and log entries of the open step."""

    def __init__(
        self,
        replicas: Replicas,
        values: ValueStore,
        streams: GradientStreams,
        entries: Entries,
        write: Callable[[TensorsRecord], None],
    ):
        self._replicas, self._values, self._streams = replicas, values, streams
        self._entries, self._write = entries, write
        self._left, self._most, self._total = 0, BySlot(), 0
        self._step, self.is_due = -1, False  # whether the actions of the step are counted
        self._own: Collection[Slot] = ()
        self._told: tuple[BySlot, BySlot] = {}, {}
        self._state: dict[int, TensorBytes] = {}  # of a stage object in the open step

    def enter(self, own: Collection[Slot]) -> None:
        """Begins to count: another program follows, with these slots of this worker."""
        self._own = own
        self._left = _STEPS
        self._most, self._total, self._state = {}, 0, {}

    def begin_step(self, step: int) -> None:
        """Decides whether the actions of a step are counted."""
        self.is_due = self._left > 0 and step != self._step
        self._step = step

    def look(self) -> None:
        """Counts what is there after an action of a step that is due."""
        now = self.count()
        if (total := sum(map(sum, now.values()))) > self._total:
            self._most, self._total = now, total

    def end_step(self, step: int) -> None:
        """Records the peak of a step, and what is there at its boundary, if they are others than before."""
        if not self.is_due:
            return
        self._state = {}
        counts = self.count(), self._most
        if counts != self._told:
            self._told = counts
            boundary, peak = (tuple((*slot, *of) for slot, of in sorted(each.items())) for each in counts)
            self._write(TensorsRecord(step=step, boundary=boundary, peak=peak))
        self._left, self._most, self._total = self._left - 1, {}, 0

    def count(self) -> BySlot:
        """Returns the bytes of the tensors that are here now."""
        stages = self._replicas.stages
        by_slot = {slot: self._of_stage(stage) for slot, stage in stages.items()}
        for value, tensors, stays in self._values.held():
            slot = self._slot_of(value)
            if slot is not None and not _is_in_stash(value, stages.get((value.pipeline, value.stage))):
                size = num_bytes(tensors_of(tensors))
                by_slot[slot] = by_slot[slot].plus(TensorBytes(retained=size) if stays else TensorBytes(transfer=size))
        counted = {grad.data_ptr() for stage in stages.values() for grad in _accumulators(stage)}
        for slot, entry in self._entries():
            for gradient in (each for named in entry.gradients.values() for each in named.values()):
                if gradient.data_ptr() not in counted and slot in by_slot:
                    counted.add(gradient.data_ptr())
                    by_slot[slot] = by_slot[slot].plus(TensorBytes(transfer=gradient.nbytes))
        for slot, streamed in self._streams.held():
            by_slot[slot] = by_slot[slot].plus(TensorBytes(accumulators=num_bytes(streamed)))
        return by_slot

    def _of_stage(self, stage: Stage) -> TensorBytes:
        state = self._state.get(id(stage))
        if state is None or self._replicas.job.fsdp:
            state = self._state[id(stage)] = self._state_of(stage)
        offloaded = sum(stage.away.values())
        stash = (len(stage.residuals) + len(stage.pending)) * self.residual(stage) - offloaded
        return state._replace(stash=stash, accumulators=num_bytes(_accumulators(stage)), offloaded=offloaded)

    def _state_of(self, stage: Stage) -> TensorBytes:
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
        )

    def residual(self, stage: Stage) -> int:
        """Returns the bytes of one microbatch in the stash of a stage."""
        layers, tried = list(stage.layers), self._replicas.residuals
        size = residual_of(stage.job, layers, {layer: sizes[0] for layer, sizes in tried.items()})
        return size + (tried[layers[0]][1] if layers[0] in tried else 0)

    def _slot_of(self, value: Value) -> Slot | None:
        """Returns the slot that a value is here for: the own one that takes it, else the own one that made it."""
        further = 1 if value.kind is Kind.ACTIVATION else -1
        near = ((value.pipeline, value.stage + further), (value.pipeline, value.stage))
        here = [slot for slot in near if slot in self._replicas.stages]
        return next((slot for slot in here if slot in self._own), here[0] if here else None)


def _accumulators(stage: Stage) -> list[Tensor]:
    return [parameter.grad for parameter in stage.trained() if parameter.grad is not None]


def _is_in_stash(value: Value, stage: Stage | None) -> bool:
    """Returns whether a residual of the stage that made a value has it too."""
    return stage is not None and value.kind is Kind.ACTIVATION and value.index in stage.residuals
