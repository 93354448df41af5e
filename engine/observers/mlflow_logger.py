"""The logger `mlflow`: MLflow by its own package, which reads ``MLFLOW_TRACKING_URI`` and the like itself."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.core.config.job import Job
from engine.observers.logger import RecoveryDone, StepDone, TrainingDone, ValidationDone

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
