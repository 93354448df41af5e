"""The judgement of a run, from its records: the ends of training and command, the comparison with the twin, the checks.

Rule: a run is red if its command failed, or if a request of `bamboo inject --run` was not passed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pandas as pd

from engine.core.errors import BY_SIGNAL
from engine.core.history.run_history import RunHistory
from engine.core.history.verdict_records import CheckRecord, ComparisonRecord, NotComparedRecord, VerdictRecord
from engine.core.texts import sentence

CHECK_COLUMNS = ["name", "result", "text", "request"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of training and the outcome and exit code of the command, each empty or None before its record.

    `checks` are the checks of the run and of each request; `findings` are those that did not pass. Without a
    `comparison`, `not_compared` says why.
    """

    training: str
    outcome: str
    exit_code: int | None
    comparison: ComparisonRecord | None
    not_compared: NotComparedRecord
    checks: tuple[CheckRecord, ...]
    findings: tuple[CheckRecord, ...]
    verdicts: tuple[VerdictRecord, ...]

    @property
    def is_red(self) -> bool:
        """Whether the command failed, or a request of `bamboo inject --run` was not passed."""
        failed = self.exit_code not in (None, 0) and not self.is_interrupted
        return failed or any(each.request and each.result != "passed" for each in self.verdicts)

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended training or the command."""
        return self.exit_code in BY_SIGNAL

    def weights(self) -> str:
        """Returns a sentence on the comparison of the weights with those of the twin."""
        return sentence(str(self.comparison or self.not_compared))


def judgement_of(history: RunHistory) -> Judgement:
    """Returns the judgement of a run."""
    training, ended = history.training_ended, history.ended
    return Judgement(
        training.outcome if training else "",
        ended.outcome if ended else "",
        ended.exit_code if ended else None,
        history.first(ComparisonRecord),
        history.first(NotComparedRecord) or NotComparedRecord(why="the run has no verdict yet"),
        tuple(history.of(CheckRecord)),
        tuple(history.findings),
        tuple(history.of(VerdictRecord)),
    )


def checks_table(judgement: Judgement) -> pd.DataFrame:
    """Returns one row per check; `request` is the file of a request of `bamboo inject --run`, else empty."""
    rows = [[getattr(each, name) for name in CHECK_COLUMNS] for each in judgement.checks]
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)


def outcome_table(judgement: Judgement) -> pd.DataFrame:
    """Returns one row: the outcome and exit code of the command, and the comparison with the twin."""
    found = judgement.comparison
    difference = found.difference if found else None
    row: dict[str, Any] = {
        "outcome": judgement.outcome,
        "exit_code": judgement.exit_code,
        "training": judgement.training,
        "weights": judgement.weights(),
        "steps_compared": found.compared if found else 0,
        "first_difference": str(difference or ""),
        "difference_step": difference.step if difference else None,
        "difference_layer": difference.layer if difference else None,
        "difference_tensor": difference.tensor if difference else "",
    }
    numbers = dict.fromkeys(["exit_code", "steps_compared", "difference_step", "difference_layer"], "Int64")
    return pd.DataFrame([row]).astype(numbers)
