"""The logger `csv`: a table of steps, validations and recoveries in the run's folder, written line by line."""

from __future__ import annotations

import csv
import io
import os
from pathlib import Path

from engine.core.config.job import Job
from engine.files.atomic_write import open_to_append
from engine.observers.logger import RecoveryDone, StepDone, TrainingDone, ValidationDone

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
