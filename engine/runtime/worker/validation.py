"""A validation pass: pipeline 0 runs only forwards over the validation split; the last stage gets the mean loss."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import fmean

from engine.core.action import Action, Op
from engine.core.ownership import Ownership
from engine.core.program.build import build_validation
from engine.core.program.dependencies import carried
from engine.core.program.routes import routes_of
from engine.core.worker.inputs import PassEnded
from engine.models.layers import Tensors
from engine.runtime.transport.transfer_key import validation_key
from engine.runtime.transport.transfers import Receiver, receives_of
from engine.runtime.transport.transport import Transport
from engine.runtime.worker.worker_context import WorkerContext

_Result = tuple[float, float | None]  # loss and metric of a microbatch


class Validation:
    """One worker's share of the validation passes under one ownership."""

    def __init__(self, context: WorkerContext, plane: Transport, ownership: Ownership):
        self.context = context
        self.channel = plane.aside
        self.grid = replace(ownership.grid, microbatches=context.job.validation_microbatches)
        alone = replace(ownership, grid=self.grid)
        program = build_validation(alone)
        self.actions = program.get(context.worker, ())
        self.routes = routes_of(context.worker, program, alone)
        self.receives = receives_of(self.actions, self.routes, context.borders, partial(validation_key, self.grid))

    def run(self) -> PassEnded:
        """Runs the pass; the owner of the last stage gets the means of loss and metric, the others no result."""
        receiver = Receiver(self.channel, self.receives)
        made: dict[tuple[int, int], Tensors] = {}  # by stage and microbatch
        results: list[_Result] = []
        for action in self.actions:
            self.context.control.check()
            if action.op is Op.RECV_F:
                value, tensors = receiver.take()
                made[value.stage, value.index] = tensors
            elif action.op is Op.SEND_F:
                tensors = made.pop((action.stage, action.microbatch))
                for target in self.routes.targets[carried(action)]:
                    self.channel.send(target, validation_key(self.grid, action), tensors)
            else:
                self._move(inside=True)
                self._forward(action, made, results)
                self._move(inside=False)
        if not results:
            return PassEnded()
        metrics = [metric for _, metric in results if metric is not None]
        return PassEnded(fmean(loss for loss, _ in results), fmean(metrics) if metrics else None)

    def _move(self, *, inside: bool) -> None:
        """Moves the position in the heartbeats on, as each action of a step does: the worker does not hang."""
        control = self.context.control
        step, index, _ = control.at
        control.at = (step, index + inside, inside)

    def _forward(self, action: Action, made: dict[tuple[int, int], Tensors], results: list[_Result]) -> None:
        context, stage = self.context, self.context.replicas.stages[0, action.stage]
        targets: Tensors = ()
        inputs: Tensors = () if action.stage == 0 else made.pop((action.stage - 1, action.microbatch))
        if action.stage == 0 or stage.is_last:
            batch = context.data.validation(action.microbatch, context.job.microbatch_size)
            inputs, targets = batch.inputs if action.stage == 0 else inputs, batch.targets
        outputs = stage.evaluate(inputs)
        if stage.is_last:
            results.append(stage.evaluate_loss(outputs, targets))
        else:
            made[action.stage, action.microbatch] = outputs
