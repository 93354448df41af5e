"""The result of a run, as `bamboo run --json` prints it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """The end of a run: its outcome in one word, its exit code, the number of committed steps, the last figures.

    `recoveries` has a line of figures for each recovery, `twin` the comparison with the twin of a run with kills, and
    `plain` all keys of `bamboo run --json`.
    """

    folder: Path
    outcome: str
    exit_code: int
    error: str | None
    steps: int
    loss: float | None
    validation_loss: float | None
    validation_metric: float | None
    trajectory: str | None
    recoveries: tuple[Mapping[str, Any], ...] = ()
    twin: Mapping[str, Any] | None = None
    plain: Mapping[str, Any] = field(default_factory=dict, repr=False)


def result_of(folder: Path, word: Mapping[str, Any]) -> TrainingResult:
    """Returns the result in the last object that a command has printed; a refusal has no figures."""
    return TrainingResult(
        folder=folder,
        outcome=str(word["outcome"]),
        exit_code=int(word["exit_code"]),
        error=word.get("error"),
        steps=int(word.get("steps") or 0),
        loss=word.get("loss_last"),
        validation_loss=word.get("validation_loss"),
        validation_metric=word.get("validation_metric"),
        trajectory=word.get("trajectory"),
        recoveries=tuple(word.get("recoveries") or ()),
        twin=word.get("twin"),
        plain=word,
    )
