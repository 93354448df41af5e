"""The judgement of a run, from its records: the ends of training and command, the comparison with the twin, the checks.

Rules: a run is red if its command failed, if a request of `bamboo inject --run` was not passed, or if its evidence
contradicts itself. What is said about the weights comes from the proof, computed from the evidence, not from a record.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from engine.core.checks.proof import UNREAD, Proof
from engine.core.errors import BY_SIGNAL
from engine.core.history.process_records import CheckRecord, ComparisonRecord, NotComparedRecord, VerdictRecord
from engine.core.history.run_history import RunHistory
from engine.core.texts import counted, sentence

CHECK_COLUMNS = ["name", "result", "text", "request"]


@dataclass(frozen=True, slots=True)
class Judgement:
    """The outcome of training and the outcome and exit code of the command, each empty or None before its record.

    `checks` are the checks of the run and of each request; `findings` are those that did not pass. `proof` has the
    comparison with the twin, unless `not_compared` says why there is none.
    """

    training: str
    outcome: str
    exit_code: int | None
    proof: Proof
    not_compared: NotComparedRecord | None
    checks: tuple[CheckRecord, ...]
    findings: tuple[CheckRecord, ...]
    verdicts: tuple[VerdictRecord, ...]

    @property
    def is_red(self) -> bool:
        """Whether the command failed, or a request of `bamboo inject --run` was not passed."""
        failed = self.exit_code not in (None, 0) and not self.is_interrupted
        requests = any(each.request and each.result != "passed" for each in self.verdicts)
        return failed or requests or bool(self.proof.flaws)

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended training or the command."""
        return self.exit_code in BY_SIGNAL

    @property
    def is_unverified(self) -> bool:
        """Whether the weights were compared, but the evidence is missing."""
        return self.not_compared is None and bool(self.proof.missing)

    @property
    def comparison(self) -> ComparisonRecord | None:
        """The comparison with the twin, if the evidence proves it."""
        return self.proof.comparison if self.proof.is_whole and self.not_compared is None else None

    def weights(self) -> str:
        """Returns a sentence on the comparison of the weights with those of the twin."""
        if self.proof.flaws:
            return f"Weights not verified: {counted(len(self.proof.flaws), 'flaw')} in the evidence."
        if self.not_compared is not None:
            return sentence(str(self.not_compared))
        return sentence(f"weights not verified: {self.proof.missing}" if self.proof.missing else str(self.comparison))

    def damage(self) -> str:
        """Returns in words the first place at which the evidence contradicts itself; empty if there is none."""
        if not self.proof.flaws:
            return ""
        others = len(self.proof.flaws) - 1
        more = f" ({counted(others, 'more flaw')})" if others else ""
        return sentence(f"damaged evidence: {self.proof.flaws[0]}{more}")


def judgement_of(history: RunHistory, proof: Proof = UNREAD) -> Judgement:
    """Returns the judgement of a run with the proof of its files."""
    not_compared = history.first(NotComparedRecord)
    if not_compared is None and history.first(ComparisonRecord) is None:
        not_compared = NotComparedRecord(why="the run has no verdict yet")
    training, ended = history.training_ended, history.ended
    return Judgement(
        training.outcome if training else "",
        ended.outcome if ended else "",
        ended.exit_code if ended else None,
        proof,
        not_compared,
        tuple(each if proof.is_whole else _unproved(each) for each in history.of(CheckRecord)),
        tuple(history.findings),
        tuple(history.of(VerdictRecord)),
    )


def _unproved(check: CheckRecord) -> CheckRecord:
    """Returns a check as it is without evidence: nothing is said of the weights."""
    if check.name != "trajectory" or check.result != "passed":
        return check
    return replace(check, result="not judged", text="the evidence does not prove it")


def checks_table(judgement: Judgement) -> pd.DataFrame:
    """Returns one row per check; `request` is the file of a request of `bamboo inject --run`, else empty."""
    rows = [[getattr(each, name) for name in CHECK_COLUMNS] for each in judgement.checks]
    return pd.DataFrame(rows, columns=CHECK_COLUMNS)


def outcome_table(judgement: Judgement) -> pd.DataFrame:
    """Returns one row: the outcome and exit code of the command, and the comparison with the twin."""
    comparison = judgement.comparison
    difference = comparison.difference if comparison else None
    row: dict[str, Any] = {
        "outcome": judgement.outcome,
        "exit_code": judgement.exit_code,
        "training": judgement.training,
        "weights": judgement.weights(),
        "steps_compared": comparison.compared if comparison else 0,
        "first_difference": str(difference or ""),
        "difference_step": difference.step if difference else None,
        "difference_layer": difference.layer if difference else None,
        "difference_tensor": difference.tensor if difference else "",
    }
    numbers = dict.fromkeys(["exit_code", "steps_compared", "difference_step", "difference_layer"], "Int64")
    return pd.DataFrame([row]).astype(numbers)
