"""Loggers: the interface, and four that come with bamboo: CSV, TensorBoard, MLflow, Weights & Biases."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine.core.job.job import Job
from engine.core.ownership import Slot
from engine.files.atomic_write import open_to_append

# The interface of a logger, and the values that it gets.
#
#     class MyLogger:
#         def step(self, done):
#             print(done.step, done.loss)
#
# Every method is optional. A logger runs in a process of its own and sees only commits, so it cannot change a bit or
# delay a step.


@dataclass(frozen=True, slots=True)
class PhaseDone:
    """A phase of a recovery, with its times in seconds since 1970."""

    name: str
    begin_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class RecoveryDone:
    """A recovery ended by a commit: the step, the evicted workers, and the source of their state.

    `stall_ms` is how long training stalled, according to the commits so far; `text` is a summary in one line. The
    `phases` are in order of time, and do not overlap.
    """

    step: int
    workers: tuple[int, ...]
    rung: str
    stall_ms: float | None
    lost_steps: int
    text: str
    phases: tuple[PhaseDone, ...] = ()


@dataclass(frozen=True, slots=True)
class CoverDone:
    """The slots, as (pipeline, stage), whose state only one worker holds from now on: its death costs steps."""

    uncovered: tuple[Slot, ...]
    at_s: float


@dataclass(frozen=True, slots=True)
class StepDone:
    """A committed step: mean loss, global norm of the gradients, seconds since the previous commit.

    `lr` is the learning rate, None if a function of the user's follows a figure. `at_s` is the time of the commit in
    seconds since 1970. `metrics` has loss, grad_norm, lr and samples_per_s by name, `layer_norms` with `--layer-norms`
    the gradient norm of each layer by ``NUMBER.NAME``. A step that is trained again is logged again.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float | None
    seconds: float
    samples: int
    at_s: float
    recoveries: tuple[RecoveryDone, ...] = ()
    layer_norms: Mapping[str, float] = field(default_factory=dict)

    @property
    def metrics(self) -> dict[str, float]:
        """The figures of the step by name."""
        metrics = {"loss": self.loss, "grad_norm": self.grad_norm} | ({} if self.lr is None else {"lr": self.lr})
        return metrics | ({"samples_per_s": self.samples / self.seconds} if self.seconds > 0 else {})


@dataclass(frozen=True, slots=True)
class ValidationDone:
    """A validation pass over one evaluation set after a step: its mean loss and metrics."""

    step: int
    name: str
    samples: int
    loss: float
    metrics: Mapping[str, float]
    at_s: float


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Where the time of a step went: milliseconds by kind (docs/time.md), in the mean over its workers."""

    step: int
    ms: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TrainingDone:
    """The end of training: its outcome in one word, its exit code, the committed steps, and the error, if any.

    `notice` names the wrong numbers that ended it, such as ``replicas-differ``; it is empty for all other ends.
    """

    outcome: str
    exit_code: int
    steps: int
    error: str
    at_s: float
    notice: str = ""


class Logger(Protocol):
    """An observer of one run. `start` is called first, `finish` last; each method is optional."""

    def start(self, job: Job, folder: Path) -> None:
        """Called before the first step with the job, without secret values, and the folder of the run."""

    def step(self, done: StepDone) -> None:
        """Called after the commit of a step."""

    def recovery(self, done: RecoveryDone) -> None:
        """Called after a recovery, before the step whose commit ended it."""

    def cover(self, done: CoverDone) -> None:
        """Called when the slots that only one worker holds are others than before."""

    def validation(self, done: ValidationDone) -> None:
        """Called after a validation pass."""

    def times(self, done: StepTimes) -> None:
        """Called at the end of training for each step, before `finish`; of a long run for some ranges of steps."""

    def finish(self, done: TrainingDone) -> None:
        """Called last, at the end of training."""


FILE = "logged.csv"  # in the run's folder, written line by line
_COLUMNS = (
    *("step", "at_s", "loss", "grad_norm", "lr", "seconds", "samples_per_s"),
    *("evaluated", "validation_loss", "metrics", "recovery", "times_ms"),
)


class CsvLogger:
    """Appends a row for each step, and one for each validation and recovery; cells that do not apply are empty."""

    def __init__(self) -> None:
        self._fd = -1

    def start(self, job: Job, folder: Path) -> None:
        """Opens the file, and writes its header."""
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

    def times(self, done: StepTimes) -> None:
        """Writes where the time of a step went, as ``kind=milliseconds``."""
        self._write({"step": done.step, "times_ms": " ".join(f"{kind}={ms:.3f}" for kind, ms in done.ms.items() if ms)})

    def finish(self, done: TrainingDone) -> None:
        """Closes the file."""
        os.close(self._fd)

    def _write(self, row: dict[str, object]) -> None:
        text = io.StringIO()
        csv.DictWriter(text, _COLUMNS, restval="", lineterminator="\n").writerow(row)
        data = text.getvalue().encode()
        while data:
            data = data[os.write(self._fd, data) :]


class _FigureLogger:
    """Logs the figures of steps and validations, and the stalls of recoveries, by the method of a subclass."""

    def step(self, done: StepDone) -> None:
        figures = {f"train/{name}": value for name, value in done.metrics.items()}
        figures |= {f"layer_grad_norm/{name}": value for name, value in done.layer_norms.items()}
        self._log(figures, done.step, done.at_s)

    def recovery(self, done: RecoveryDone) -> None:
        self._log({"recovery/stall_ms": done.stall_ms or 0.0}, done.step)

    def validation(self, done: ValidationDone) -> None:
        figures = {"loss": done.loss, **done.metrics}
        self._log({f"{done.name}/{name}": value for name, value in figures.items()}, done.step, done.at_s)

    def times(self, done: StepTimes) -> None:
        self._log({f"time/{kind}_ms": ms for kind, ms in done.ms.items()}, done.step)

    def _log(self, figures: Mapping[str, float], step: int, at_s: float | None = None) -> None:
        raise NotImplementedError


_MOST_OF_VALUE = 500  # characters of a parameter that every store accepts


class MlflowLogger(_FigureLogger):
    """Logs to MLflow, with the job as parameters; its package reads ``MLFLOW_TRACKING_URI`` and the like itself."""

    def __init__(self) -> None:
        self._mlflow: Any = None

    def start(self, job: Job, folder: Path) -> None:
        """Begins a run of MLflow with the name of this run."""
        import mlflow

        self._mlflow = mlflow
        mlflow.start_run(run_name=folder.name)
        mlflow.log_params({name: str(value)[:_MOST_OF_VALUE] for name, value in asdict(job).items()})

    def finish(self, done: TrainingDone) -> None:
        """Ends the run of MLflow."""
        self._mlflow.end_run("KILLED" if done.outcome == "interrupted" else "FAILED" if done.exit_code else "FINISHED")

    def _log(self, figures: Mapping[str, float], step: int, at_s: float | None = None) -> None:
        self._mlflow.log_metrics(dict(figures), step=step)


FOLDER = "tensorboard"  # in the run's folder: tensorboard --logdir results


class TensorboardLogger(_FigureLogger):
    """Writes ``train/...`` for each step, ``NAME/...`` for each evaluation set; recoveries and the job as texts."""

    def __init__(self) -> None:
        self._writer: Any = None

    def start(self, job: Job, folder: Path) -> None:
        """Opens the writer, and writes the job."""
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._writer = EventFileWriter(str(folder / FOLDER), flush_secs=2)
        self._text("job", 0, "\n".join(f"    {name}: {value}" for name, value in asdict(job).items()))

    def recovery(self, done: RecoveryDone) -> None:
        """Writes the line about a recovery as a text, and the stall as a figure."""
        self._text("recovery", done.step, done.text)
        if done.stall_ms is not None:
            super().recovery(done)

    def finish(self, done: TrainingDone) -> None:
        """Closes the files."""
        self._writer.close()

    def _log(self, figures: Mapping[str, float], step: int, at_s: float | None = None) -> None:
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


class WandbLogger(_FigureLogger):
    """Logs to Weights & Biases, also the number of recoveries; the job is the configuration.

    Its package reads ``WANDB_PROJECT`` and the like itself. It accepts the figures of a step once, and drops those of a
    step that is trained again, with a warning.
    """

    def __init__(self) -> None:
        self._run: Any = None
        self._num_recoveries = 0

    def start(self, job: Job, folder: Path) -> None:
        """Begins a run of W&B with the name of this run."""
        import wandb

        project = os.environ.get("WANDB_PROJECT", "bamboo")
        self._run = wandb.init(project=project, name=folder.name, dir=str(folder), config=asdict(job))

    def recovery(self, done: RecoveryDone) -> None:
        """Logs the stall of a recovery."""
        self._num_recoveries += 1
        super().recovery(done)

    def times(self, done: StepTimes) -> None:
        """Logs nothing: W&B accepts no figure of a step that is over."""

    def _log(self, figures: Mapping[str, float], step: int, at_s: float | None = None) -> None:
        self._run.log(dict(figures), step=step)

    def finish(self, done: TrainingDone) -> None:
        """Ends the run of W&B with the exit code of training."""
        self._run.summary["recoveries"] = self._num_recoveries
        self._run.finish(exit_code=done.exit_code)
