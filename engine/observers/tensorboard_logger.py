"""The logger `tensorboard`: event files in the folder `tensorboard` of the run, written by TensorBoard's own package.

tensorboard --logdir results
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.core.config.job import Job
from engine.observers.logger import RecoveryDone, StepDone, TrainingDone, ValidationDone

FOLDER = "tensorboard"


class TensorboardLogger:
    """Writes ``train/...`` for each step, ``NAME/...`` for each evaluation set; recoveries and the job as texts."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, job: Job, folder: Path) -> None:
        """Makes the writer; the job becomes a text."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder / FOLDER), flush_secs=2)
        self._text("job", 0, "\n".join(f"    {name}: {value}" for name, value in asdict(job).items()))

    def step(self, done: StepDone) -> None:
        """Writes the figures of a step."""
        self._scalars({f"train/{name}": value for name, value in done.metrics.items()}, done.step, done.at_s)

    def recovery(self, done: RecoveryDone) -> None:
        """Writes the line about a recovery as a text, and the stall as a figure."""
        self._text("recovery", done.step, done.text)
        if done.stall_ms is not None:
            self._scalars({"recovery/stall_ms": done.stall_ms}, done.step, None)

    def validation(self, done: ValidationDone) -> None:
        """Writes the figures of a validation."""
        figures = {"loss": done.loss, **done.metrics}
        self._scalars({f"{done.name}/{name}": value for name, value in figures.items()}, done.step, done.at_s)

    def finish(self, done: TrainingDone) -> None:
        """Closes the files."""
        self._writer.close()

    def _scalars(self, figures: Mapping[str, float], step: int, at_s: float | None) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in figures.items()]
        self._write(Summary(value=values), step, at_s)

    def _text(self, tag: str, step: int, text: str) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
        from tensorboard.compat.proto.types_pb2 import DT_STRING

        shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
        tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()], tensor_shape=shape)
        kind = SummaryMetadata(plugin_data=SummaryMetadata.PluginData(plugin_name="text"))
        self._write(Summary(value=[Summary.Value(tag=f"{tag}/text_summary", metadata=kind, tensor=tensor)]), step, None)

    def _write(self, summary: Any, step: int, at_s: float | None) -> None:
        import time

        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time.time() if at_s is None else at_s, summary=summary))
