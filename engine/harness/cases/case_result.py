"""The result of a case: its checks, verdict and recoveries; also as an error, a summary and plain values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.core.checks.expectations import Check, Observed, check, decided, exit_code, verdict, why_not_struck
from engine.core.checks.recovery_times import Recovery
from engine.core.checks.stall import Stall, quantile
from engine.core.checks.strike_accuracy import strike_accuracy
from engine.core.errors import BY_SIGNAL, BambooError, ExitCode, UserCodeError
from engine.core.faults.fault import Fault
from engine.core.faults.scenario import Scenario
from engine.core.history.process_records import EndedRecord
from engine.core.history.record import StampedRecord
from engine.core.history.run_records import ConfirmedRecord, RaisedRecord
from engine.core.history.verdict_records import CheckRecord, ComparisonRecord, Result, VerdictRecord


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one run of a case; `run_error` is the error that ended the run, `summary` has its figures.

    `is_scenario`: the command is `bamboo inject`, whose exit code is that of the case, not `bamboo run`.
    """

    folder: Path
    faults: tuple[Fault, ...]
    seen: Observed
    checks: tuple[Check, ...]
    exit_code: ExitCode
    recoveries: tuple[Recovery, ...]
    run_error: BambooError | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)
    is_scenario: bool = False

    @property
    def verdict(self) -> Result:
        """The verdict over all checks."""
        return verdict(self.checks)

    @property
    def is_interrupted(self) -> bool:
        """Whether a signal ended the run or its twin; then the checks are those that could be made."""
        return self.exit_code in BY_SIGNAL

    @property
    def verdict_word(self) -> str:
        """The verdict, or ``interrupted``."""
        return "interrupted" if self.is_interrupted else self.verdict

    @property
    def error(self) -> BambooError | None:
        """The error that ended the run, or the first check that failed; None if all passed, or after a signal."""
        if self.run_error is not None or self.seen.exit_code or self.verdict == "passed" or self.is_interrupted:
            return self.run_error
        text = next(each.text for each in self.checks if each.result == self.verdict)
        if self.verdict == "invalid":
            text = f"the case is invalid, nothing was proved: {text}"
        return BambooError(text, self.exit_code)

    def may_go_on(self, steps: int) -> bool:
        """Returns whether some of the `steps` are left to train, and no comparison has found the weights wrong."""
        twin = self.seen.twin
        is_wrong = isinstance(twin, ComparisonRecord) and twin.difference is not None
        return self.summary["steps"] < steps and not is_wrong

    def recovery_lines(self) -> list[str]:
        """Returns one line per recovery; it says if a comparison with the twin proved identical weights."""
        if isinstance(self.run_error, UserCodeError):
            return []  # every worker would have raised it: no worker could take over
        twin, proved = self.seen.twin, ""
        if isinstance(twin, ComparisonRecord) and twin.difference is None and twin.compared:
            is_last = twin.last_step == self.summary["steps"] - 1
            proved = ", weights identical" + ("" if is_last else f" up to step {twin.last_step}")
        return [f"{each}{proved if each.resume_ns is not None or each.after_end else ''}" for each in self.recoveries]

    def exceptions(self) -> tuple[str, ...]:
        """Returns in words the exceptions in workers that no fault raised."""
        history = self.seen.history
        injected = {each.how for each in history.of(ConfirmedRecord)}
        return tuple(
            f"worker {each.of} {each.exception.in_step(each.step)}"
            for each in history.of(RaisedRecord)
            if f"raised: {each.error}" not in injected and not each.exception.is_injected
        )

    def as_dict(self) -> dict[str, Any]:
        """Returns the case as plain values."""
        return {
            "run_dir": str(self.folder),
            "verdict": self.verdict_word,
            "exit_code": int(self.exit_code),
            "checks": [asdict(each) for each in self.checks],
            "recoveries": [each.as_dict() for each in self.recoveries],
            "exceptions": self.exceptions(),
        }

    @property
    def ended(self) -> EndedRecord:
        """The end of the command: its outcome in one word, and its exit code."""
        is_own = self.error is not None and self.error is not self.run_error  # training finished, and a check failed
        if self.is_scenario or is_own or self.is_interrupted:
            return EndedRecord(outcome=self.verdict_word, exit_code=int(self.exit_code))
        return EndedRecord(outcome=self.summary["outcome"], exit_code=self.summary["exit_code"])

    def records(self, request: str = "") -> Iterator[StampedRecord]:
        """Yields the checks and the verdict as records of the run, or of a request to it."""
        for each in self.checks:
            yield CheckRecord(name=each.name, result=each.result, text=each.text, request=request)
        yield VerdictRecord(result=self.verdict, exit_code=self.ended.exit_code, request=request)

    def to_plain(self) -> dict[str, Any]:
        """Returns the summary of the run with the outcome and exit code of the command, for `run.json`."""
        ended = self.ended
        found = {**self.summary, "outcome": ended.outcome, "exit_code": ended.exit_code}
        if self.is_scenario:
            return {**found, "case": self.as_dict()}
        return {
            **found,
            "error": None if self.error is None else str(self.error),
            # An interrupted long run is not read again.
            "recoveries": [each.as_dict() for each in self.recoveries] if not self.seen.history.is_empty else None,
            "exceptions": self.exceptions(),
            "faults": [{"fault": each.id, "fired": not why_not_struck(each, self.seen)} for each in self.faults],
            "twin": _twin(self.seen.twin),
        }


def _twin(twin: ComparisonRecord | BambooError | None) -> dict[str, Any] | None:
    """Returns the comparison with the twin as plain values, or the error of the twin."""
    if isinstance(twin, ComparisonRecord):
        difference = None if twin.difference is None else str(twin.difference)
        return {"steps_compared": twin.compared, "difference": difference}
    return None if twin is None else {"error": str(twin)}


def judged(scenario: Scenario, faults: tuple[Fault, ...], folder: Path, seen: Observed) -> CaseResult:
    """Returns the result of a case: the checks of its expectations, and of the actions at which its faults struck."""
    from engine.runtime.faults.registry import kinds

    checks = check(scenario.expect, scenario.job, faults, kinds(), seen)
    checks = (*checks, *strike_accuracy(scenario.job, faults, seen.history))
    code = exit_code(checks, seen)
    checks = decided(checks, seen) if code in BY_SIGNAL else checks
    return CaseResult(folder, faults, seen, checks, code, tuple(seen.recoveries))


def stall_figures(results: Sequence[CaseResult]) -> dict[str, Stall]:
    """Returns p50, p95 and max of the times that training stalled in some cases; unfinished recoveries do not count."""
    recoveries = [each for case in results for each in case.recoveries if each.resume_ns is not None]
    stalls = [each.stall for each in recoveries if each.stall]
    parts = {"p50": 0.5, "p95": 0.95, "max": 1.0} if stalls else {}
    return {name: quantile(stalls, part) for name, part in parts.items()}
