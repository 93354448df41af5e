"""Loggers: the base class, and those that come with the program: CSV, TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from engine.core.job.job import Job
from engine.files.atomic_write import open_to_append

# The interface of a logger, and the values that it gets.
#
#     class MyLogger:
#         def step(self, done):
#             print(done.step, done.loss)
#
# Every method may be missing. A logger runs in a process of its own; it gets what is committed already, and nothing
# that it does can change a bit or the time of a step.


@dataclass(frozen=True, slots=True)
class RecoveryDone:
    """A recovery that a commit has ended: the step, the workers that are out, and the source of their state.

    `stall_ms` is the time that training stood, as far as the commits tell so far; `text` says all in one line.
    """

    step: int
    workers: tuple[int, ...]
    rung: str
    stall_ms: float | None
    lost_steps: int
    text: str


@dataclass(frozen=True, slots=True)
class StepDone:
    """A committed step: mean loss, global norm of the gradients, its seconds since the commit before.

    `lr` is the learning rate, None for a schedule that is not built in. `at_s` is the time of the commit in seconds
    since 1970. `metrics` has loss, grad_norm, lr and samples_per_s by name. A step that was lost and trained again
    comes again.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float | None
    seconds: float
    samples: int
    at_s: float
    recoveries: tuple[RecoveryDone, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the step by name."""
        found = {"loss": self.loss, "grad_norm": self.grad_norm}
        found |= {} if self.lr is None else {"lr": self.lr}
        return found | ({"samples_per_s": self.samples / self.seconds} if self.seconds > 0 else {})


@dataclass(frozen=True, slots=True)
class ValidationDone:
    """A validation pass after a step over one evaluation set: its loss and its metrics by name, as means."""

    step: int
    name: str
    samples: int
    loss: float
    metrics: Mapping[str, float]
    at_s: float


@dataclass(frozen=True, slots=True)
class TrainingDone:
    """The end of training: its outcome in one word, its exit code, the committed steps, and the error, if any."""

    outcome: str
    exit_code: int
    steps: int
    error: str
    at_s: float


class Logger(Protocol):
    """An observer of one run. The methods are called in this order; each of them may be missing."""

    def start(self, job: Job, folder: Path) -> None:
        """Takes the job, without secret values, and the folder of the run, before the first step."""

    def step(self, done: StepDone) -> None:
        """Takes a step after its commit."""

    def recovery(self, done: RecoveryDone) -> None:
        """Takes a recovery, before the step whose commit ended it."""

    def validation(self, done: ValidationDone) -> None:
        """Takes a validation pass."""

    def finish(self, done: TrainingDone) -> None:
        """Takes the end of training; no call follows."""


# The logger `csv`: a table of steps, validations and recoveries in the run's folder, written line by line.
FILE = "logged.csv"
_COLUMNS = (
    *("step", "at_s", "loss", "grad_norm", "lr", "seconds", "samples_per_s"),
    *("evaluated", "validation_loss", "metrics", "recovery"),
)


class CsvLogger:
    """Appends a row for each step, and one for each validation and recovery; cells that do not apply are empty."""

    def __init__(self) -> None:
        self._fd = -1

    def start(self, job: Job, folder: Path) -> None:
        """Opens the file, and writes its titles."""
        self._fd = open_to_append(folder / FILE)
        self._write(dict(zip(_COLUMNS, _COLUMNS, strict=True)))

    def step(self, done: StepDone) -> None:
        """Writes the figures of a step."""
        self._write({"step": done.step, "at_s": f"{done.at_s:.3f}", "seconds": f"{done.seconds:.6f}", **done.metrics})

    def recovery(self, done: RecoveryDone) -> None:
        """Writes the line about a recovery."""
        self._write({"step": done.step, "recovery": done.text})

    def validation(self, done: ValidationDone) -> None:
        """Writes the name of an evaluation set, its loss, and its metrics as ``name=value``."""
        metrics = " ".join(f"{name}={value}" for name, value in done.metrics.items())
        row = {"step": done.step, "at_s": f"{done.at_s:.3f}", "evaluated": done.name}
        self._write({**row, "validation_loss": done.loss, "metrics": metrics})

    def finish(self, done: TrainingDone) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _write(self, row: dict[str, object]) -> None:
        text = io.StringIO()
        csv.DictWriter(text, _COLUMNS, restval="", lineterminator="\n").writerow(row)
        data = text.getvalue().encode()
        while data:
            data = data[os.write(self._fd, data) :]


# The logger `mlflow`: MLflow by its own package, which reads ``MLFLOW_TRACKING_URI`` and the like itself.
_MOST_OF_VALUE = 500  # characters of a parameter that every store takes


class MlflowLogger:
    """Logs the figures of steps and validations, the stalls of recoveries, and the job as parameters."""

    def __init__(self) -> None:
        self._mlflow: Any = None

    def start(self, job: Job, folder: Path) -> None:
        """Begins a run of MLflow with the name of this run."""
        import mlflow

        self._mlflow = mlflow
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params({name: str(value)[:_MOST_OF_VALUE] for name, value in asdict(job).items()})

    def step(self, done: StepDone) -> None:
        """Logs the figures of a step."""
        self._mlflow.log_metrics({f"train/{name}": value for name, value in done.metrics.items()}, step=done.step)

    def recovery(self, done: RecoveryDone) -> None:
        """Logs the stall of a recovery."""
        self._mlflow.log_metrics({"recovery/stall_ms": done.stall_ms or 0.0}, step=done.step)

    def validation(self, done: ValidationDone) -> None:
        """Logs the figures of a validation."""
        figures = {"loss": done.loss, **done.metrics}
        self._mlflow.log_metrics({f"{done.name}/{name}": value for name, value in figures.items()}, step=done.step)

    def finish(self, done: TrainingDone) -> None:
        """Ends the run of MLflow."""
        self._mlflow.end_run("KILLED" if done.outcome == "interrupted" else "FAILED" if done.exit_code else "FINISHED")


# The logger `tensorboard`: event files in the folder `tensorboard` of the run, written by TensorBoard's own package.
#
# tensorboard --logdir results

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


# The logger `wandb`: Weights & Biases by its own package, which reads ``WANDB_PROJECT`` and the like itself.
class WandbLogger:
    """Logs the figures of steps and validations, and the number of recoveries; the job is the configuration.

    W&B takes the figures of a step once: those of a step that is trained again are dropped, with a warning of W&B.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._num_recoveries = 0

    def start(self, job: Job, folder: Path) -> None:
        """Begins a run of W&B with the name of this run."""
        import wandb

        project = os.environ.get("WANDB_PROJECT", "bamboo")
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=asdict(job))

    def step(self, done: StepDone) -> None:
        """Logs the figures of a step."""
        self._run.log({f"train/{name}": value for name, value in done.metrics.items()}, step=done.step)

    def recovery(self, done: RecoveryDone) -> None:
        """Logs the stall of a recovery."""
        self._num_recoveries += 1
        self._run.log({"recovery/stall_ms": done.stall_ms or 0.0}, step=done.step)

    def validation(self, done: ValidationDone) -> None:
        """Logs the figures of a validation."""
        figures = {"loss": done.loss, **done.metrics}
        self._run.log({f"{done.name}/{name}": value for name, value in figures.items()}, step=done.step)

    def finish(self, done: TrainingDone) -> None:
        """Ends the run of W&B with the exit code of training."""
        self._run.summary["recoveries"] = self._num_recoveries
        self._run.finish(exit_code=done.exit_code)
