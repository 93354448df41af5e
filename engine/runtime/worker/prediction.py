"""A prediction: a validation pass that keeps the outputs of the last stage in place of a loss."""

from __future__ import annotations

from pathlib import Path

from engine.core.job.samples import EvaluationPart
from engine.core.messages import Evaluation
from engine.models.data_sources import EvaluatedBatch
from engine.models.layers import Batch
from engine.models.predicted_samples import PredictedSamples
from engine.runtime.checkpoint.outputs import write_outputs
from engine.runtime.stage.stage import Stage
from engine.runtime.worker.validation import Validation


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
