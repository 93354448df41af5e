"""The logger `wandb`: Weights & Biases by its own package, which reads ``WANDB_PROJECT`` and the like itself."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.core.config.job import Job
from engine.observers.logger import RecoveryDone, StepDone, TrainingDone, ValidationDone


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
