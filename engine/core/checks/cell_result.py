"""The result of one cell of a matrix, the exit code of a matrix, and the kinds of failure that CI sees.

Rules: a cell has the result of its worst check: passed, failed or invalid. A matrix with a failed cell failed; one with
an invalid cell is invalid; one without any result matched nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from engine.core.checks.expectations import Check, verdict
from engine.core.errors import ExitCode
from engine.core.history.process_records import Result

Failure = Literal["", "threshold", "mismatch", "no_recovery", "hang"]


@dataclass(frozen=True, slots=True)
class CellResult:
    """The result of a cell: `text` is the reason in one line, `do` the first fault's kind, `run` the run folder.

    `stall_ms` is the longest stall, None without a recovery; `stall_bound` says ``at least`` for a lower bound.
    """

    cell: str
    result: Result
    failure: Failure
    text: str
    do: str = ""
    seconds: float = 0.0
    seed: int = 0
    run: str = ""
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    line: int = 0  # in the matrix file
    key: str = ""  # `key_of` its scenario and settings
    stall_ms: float | None = None
    stall_bound: str = ""
    raised: tuple[str, ...] = ()  # the exceptions in its workers that no fault raised

    @property
    def verdict(self) -> str:
        """The result in words, such as ``passed`` or ``failed (mismatch)``."""
        return f"{self.result} ({self.failure})" if self.failure else self.result

    @property
    def details(self) -> list[str]:
        """The reason of a result other than passed, and the exceptions with the name of the cell."""
        reason = [] if self.result == "passed" else [self.text]
        return [*reason, *(f"{self.cell}: {each}" for each in self.raised)]


def key_of(scenario: Mapping[str, Any], settings: Sequence[str]) -> str:
    """Returns a hash of a scenario, as plain values, and its settings: a changed cell under an old name differs."""
    return hashlib.sha256(json.dumps([scenario, list(settings)], sort_keys=True).encode()).hexdigest()[:16]


def judged(checks: Sequence[Check]) -> tuple[Result, Failure, str]:
    """Returns the result of a cell, its kind of failure, and its worst check in words."""
    result = verdict(checks)
    worst = next((each for each in checks if each.result == result), None)
    if result == "passed" or worst is None:
        return result, "", "; ".join(f"{each.name}: {each.text}" for each in checks)
    text = f"{worst.name}: {worst.text}"
    return result, failure_of(worst.name) if result == "failed" else "", text


def failure_of(check: str) -> Failure:
    """Returns the kind of failure of a check that failed."""
    if check == "outcome":
        return "no_recovery"
    return "threshold" if check.startswith(("recovery", "steps_lost")) else "mismatch"


def matrix_exit_code(results: Collection[CellResult]) -> ExitCode:
    """Returns the exit code of a matrix."""
    counts = Counter(each.result for each in results)
    if counts["failed"]:
        return ExitCode.EXPECTATION_FAILED
    if counts["invalid"]:
        return ExitCode.INVALID_CASE
    return ExitCode.OK if results else ExitCode.NOTHING_MATCHED


def counts_text(results: Collection[CellResult]) -> str:
    """Returns the number of cells with each result, in words."""
    counts = Counter(each.result for each in results)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['invalid']} invalid"
