"""A validation pass: pipeline 0 runs forwards alone over the validation split; the last stage has the mean loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from engine.core.action import Action, Op
from engine.core.ownership import Ownership
from engine.core.program import build_validation
from engine.models.layers import Tensors
from engine.runtime.executor import Surroundings
from engine.runtime.transfers import Receiver, receives_of, send_key


@dataclass(frozen=True, slots=True)
class Validated:
    """Mean loss over the validation microbatches, and mean metric if the model has one."""

    loss: float
    metric: float | None


class Validation:
    """One worker's share of a validation pass."""

    def __init__(self, around: Surroundings):
        self.around = around
        grid = replace(around.ownership.grid, microbatches=around.job.validation_microbatches)
        self.ownership = Ownership(grid, around.ownership.owners)
        self.actions: Sequence[Action] = build_validation(self.ownership)[around.worker]
        self.receives = receives_of(self.actions, around.worker, self.ownership, around.borders, validation=True)

    def run(self) -> Validated | None:
        """Runs the pass; the owner of the last stage gets the result, the others None."""
        around = self.around
        receiver = Receiver(around.plane, self.receives)
        made: Tensors = ()
        results: list[tuple[float, float | None]] = []
        for action in self.actions:
            around.control.check()
            if action.op is Op.RECV_F:
                made = receiver.take()
            elif action.op is Op.SEND_F:
                target = self.ownership.owner(0, action.stage + 1)
                around.plane.send(target, send_key(self.ownership.grid, action, validation=True), made)
            else:
                made = self._forward(action, made, results)
        if not results:
            return None
        losses, metrics = zip(*results, strict=True)
        return Validated(fmean(losses), None if metrics[0] is None else fmean(metrics))

    def _forward(self, action: Action, made: Tensors, results: list[tuple[float, float | None]]) -> Tensors:
        around = self.around
        stage = around.stages[0, action.stage]
        batch = None
        if action.stage == 0 or stage.is_last:
            batch = around.data.validation(action.microbatch, around.job.microbatch_size)
            made = batch.inputs if action.stage == 0 else made
        made = stage.evaluate(made)
        if stage.is_last:
            assert batch is not None
            results.append(stage.evaluate_loss(made, batch.targets))
        return made
