"""What came of one cell of a matrix, of a whole matrix, and how a failure is called where others read it.

Rules: a cell is passed, failed or invalid, as its worst check is. A matrix with a failed cell failed; one in which
something proved nothing is invalid; one without any result has matched nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from engine.core.checks.expectations import Check, Result, verdict
from engine.core.errors import ExitCode

Failure = Literal["", "threshold", "mismatch", "no_recovery", "hang"]

_THRESHOLDS = ("recovery", "steps_lost")


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell that was run: `text` says in one line why it is what it is, `do` is what was done, `run` its folder."""

    cell: str
    result: Result
    failure: Failure
    text: str
    do: str
    seconds: float
    seed: int
    run: str
    labels: Mapping[str, str] = field(default_factory=dict, hash=False)
    line: int = 0  # of the matrix file
    key: str = ""  # of the scenario that was run, with its settings

    def to_plain(self) -> dict[str, Any]:
        """Returns it as values that JSON can hold."""
        return asdict(self)


def key_of(scenario: Mapping[str, Any], settings: Sequence[str]) -> str:
    """Returns what tells a cell's scenario, as plain values, and its settings from others under the same name."""
    return hashlib.sha256(json.dumps([scenario, list(settings)], sort_keys=True).encode()).hexdigest()[:16]


def from_plain(plain: Mapping[str, Any]) -> CellResult:
    """Returns the result that `to_plain` made these values of; raises TypeError when it made no such values."""
    return CellResult(**plain)


def judged(checks: Sequence[Check]) -> tuple[Result, Failure, str]:
    """Returns the result of a cell, how its failure is called, and its worst check in words."""
    result = verdict(checks)
    worst = next((each for each in checks if each.result == result), None)
    if result == "passed" or worst is None:
        return result, "", "; ".join(f"{each.name}: {each.text}" for each in checks)
    text = f"{worst.name}: {worst.text}"
    return result, failure_of(worst.name) if result == "failed" else "", text


def failure_of(check: str) -> Failure:
    """Returns how the failure of a check is called."""
    if check == "outcome":
        return "no_recovery"
    return "threshold" if check.startswith(_THRESHOLDS) else "mismatch"


def matrix_exit_code(results: Collection[CellResult]) -> ExitCode:
    """Returns the exit code of a matrix."""
    counts = Counter(each.result for each in results)
    if counts["failed"]:
        return ExitCode.EXPECTATION_FAILED
    if counts["invalid"]:
        return ExitCode.INVALID_CASE
    return ExitCode.OK if results else ExitCode.NOTHING_MATCHED


def counted(results: Collection[CellResult]) -> str:
    """Returns how many cells came to what, in words."""
    counts = Counter(each.result for each in results)
    return f"{counts['passed']} passed, {counts['failed']} failed, {counts['invalid']} invalid"
