"""The interface of a logger, and the values that it gets.

    class MyLogger:
        def step(self, done):
            print(done.step, done.loss)

Every method may be missing. A logger runs in a process of its own; it gets what is committed already, and nothing that
it does can change a bit or the time of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from engine.core.config.job import Job


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
