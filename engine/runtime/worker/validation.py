"""A validation pass: pipeline 0 runs only forwards over the evaluation sets; the last stage gets loss and metrics.

Rule: each microbatch counts by its samples. Those behind the end of a finite set are cut off before the loss.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import fmean

from engine.core.action import Action, Op
from engine.core.errors import Problem, UserError
from engine.core.job.job import PERPLEXITY, Job, named_metrics
from engine.core.job.samples import EvaluationPart, left_out, parts_of
from engine.core.job.update_rules import monitor_rules
from engine.core.messages import Evaluation
from engine.core.monitors import needs_validations
from engine.core.ownership import Ownership
from engine.core.program.build import build_validation
from engine.core.program.dependencies import carried, peers_of, routes_of
from engine.core.protocol.worker_inputs import PassEnded
from engine.models.data import Data
from engine.models.data_sources import EvaluatedBatch, evaluation, evaluation_sets
from engine.models.layers import Batch, Model, Tensors
from engine.models.predicted_samples import PredictedSamples
from engine.runtime.checkpoint.outputs import write_outputs
from engine.runtime.stage.stage import Stage
from engine.runtime.transport.transfers import Receiver, receives_of
from engine.runtime.transport.transport import Transport, validation_key, whole_border
from engine.runtime.worker.microbatches import on_device
from engine.runtime.worker.step_end import WorkerContext

_MOST_EXPONENT = 700.0  # of a float64
_Result = tuple[EvaluationPart, float, dict[str, float]]  # loss and metrics of a microbatch


def unmeasured(job: Job, model: Model, data: Data) -> tuple[str, ...]:
    """Returns notes on samples that no pass measures; raises UserError for a set of which none would be measured.

    Likewise if there is no set, and the job needs one.
    """
    if job.predict_args:
        PredictedSamples(job, data)
        return ()
    if not evaluation_sets(data) and needs_validations(monitor_rules(job)):
        raise UserError([Problem("data", "an evaluation set, for the figures of the job", repr(job.data))])
    if model.is_cut_by_sample or not job.validate_every:
        return ()
    return left_out(job, evaluation_sets(data))


class Validation:
    """One worker's share of the validation passes under one ownership."""

    def __init__(self, context: WorkerContext, plane: Transport, ownership: Ownership):
        self.context = context
        self.channel = plane.aside
        self.parts = self._parts()
        self.is_at_end = ownership.owner(0, ownership.grid.stages - 1) == context.worker
        self._results: list[_Result] = []
        self._begin = EvaluatedBatch((), ())  # of the set that is being measured
        self.grid = replace(ownership.grid, microbatches=len(self.parts), slices=1)
        alone = replace(ownership, grid=self.grid)
        program = build_validation(alone, only=peers_of(context.worker, alone))
        self.actions = program.get(context.worker, ())
        self.routes = routes_of(context.worker, program, alone)
        borders = tuple(whole_border(border, context.job.slices) for border in context.borders)
        self.receives = receives_of(self.actions, self.routes, borders, partial(validation_key, self.grid))

    def run(self) -> PassEnded:
        """Runs the pass; the owner of the last stage gets the results, the others none."""
        receiver = Receiver(self.channel, self.receives)
        outputs: dict[tuple[int, int], Tensors] = {}  # by stage and microbatch
        self._results.clear()
        for action in self.actions:
            self.context.control.check()
            if action.op is Op.RECV_F:
                value, tensors = receiver.take()
                outputs[value.stage, value.index] = tensors
            elif action.op is Op.SEND_F:
                tensors = outputs.pop((action.stage, action.microbatch))
                for target in self.routes.targets[carried(action)]:
                    self.channel.send(target, validation_key(self.grid, action), tensors)
            else:
                with self.context.control.busy():
                    self._forward(action, outputs)
        return PassEnded(self._result() if self.is_at_end else None)

    def _parts(self) -> tuple[EvaluationPart, ...]:
        only_whole = not self.context.replicas.model.is_cut_by_sample
        return parts_of(self.context.job, evaluation_sets(self.context.data), only_whole=only_whole)

    def _batch(self, part: EvaluationPart) -> Batch:
        return evaluation(self.context.data, part.name, part.number, self.context.job.microbatch_size)

    def _result(self) -> tuple[Evaluation, ...]:
        return tuple(self._mean(name) for name in dict.fromkeys(part.name for part in self.parts))

    def _mean(self, name: str) -> Evaluation:
        own = [each for each in self._results if each[0].name == name]
        shares = [part.rows / self.context.job.microbatch_size for part, _, _ in own]
        loss = fmean((each for _, each, _ in own), shares)
        metrics = {metric: fmean((values[metric] for _, _, values in own), shares) for metric in own[0][2]}
        for metric, path in named_metrics(self.context.job).items():
            if path == PERPLEXITY:
                metrics[metric] = math.exp(loss) if loss < _MOST_EXPONENT else math.inf
        return Evaluation(name, sum(part.rows for part, _, _ in own), loss, metrics)

    def _forward(self, action: Action, made: dict[tuple[int, int], Tensors]) -> None:
        context, stage = self.context, self.context.replicas.stages[0, action.stage]
        targets: Tensors = ()
        inputs: Tensors = () if action.stage == 0 else made.pop((action.stage - 1, action.microbatch))
        part = self.parts[action.microbatch]
        if action.stage == 0 or stage.is_last:
            batch = on_device(self._batch(part), context.replicas.device)
            inputs, targets = batch.inputs if action.stage == 0 else inputs, batch.targets
        outputs = stage.evaluate(inputs)
        if stage.is_last:
            self._take(stage, action.microbatch, EvaluatedBatch(outputs, targets))
        else:
            made[action.stage, action.microbatch] = outputs

    def _take(self, stage: Stage, number: int, measured: EvaluatedBatch) -> None:
        part, size = self.parts[number], self.context.job.microbatch_size
        if part.number == 0:
            self._begin = measured
        if part.rows < size:
            measured = measured.first(part, size, self._begin, is_narrow=self.context.job.dtype != "float32")
        self._results.append((part, *stage.evaluate_loss(*measured)))


# A prediction is a pass that keeps the outputs of the last stage in place of a loss.
class Prediction(Validation):
    """One worker's share of a prediction under one ownership; a pass that runs again writes the same files."""

    def _parts(self) -> tuple[EvaluationPart, ...]:
        self._samples = PredictedSamples(self.context.job, self.context.data)
        return self._samples.parts()

    def _batch(self, part: EvaluationPart) -> Batch:
        return self._samples.batch(part.number)

    def _result(self) -> tuple[Evaluation, ...]:
        return ()

    def _take(self, stage: Stage, number: int, measured: EvaluatedBatch) -> None:
        outputs = measured.outputs[stage.model.num_loss_outputs :]
        rows, size = self._samples.rows, self.context.job.microbatch_size
        write_outputs(Path(self.context.outputs), number, outputs, rows, size)
