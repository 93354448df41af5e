"""Checks the expectations of a scenario against an observed run, and gives the verdict of the case.

Rules: pure. A fault that did not strike, or whose effect was not seen, makes the case invalid, because the case proved
nothing. An expectation that could not be checked makes it invalid too. An invalid case never passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, TypeVar

from engine.core.checks.recovery_log import recoveries
from engine.core.checks.recovery_times import Recovery
from engine.core.checks.samples import miscounted
from engine.core.checks.stall import Stall, quantile
from engine.core.config.job import Job
from engine.core.duration import duration_text
from engine.core.errors import BY_SIGNAL, BambooError, ExitCode
from engine.core.faults.fault import WHOLE_AFTERWARDS, At, Fault
from engine.core.faults.fault_kind import FaultKind
from engine.core.faults.scenario import Agreement, Expect, Limits, Outcome
from engine.core.history.gaps import left_out_steps
from engine.core.history.process_records import ExitRecord, FailedRecord
from engine.core.history.record import StampedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import CommitRecord, ConfirmedRecord, EpochRecord, FaultRecord, NoticeRecord
from engine.core.history.verdict_records import ComparisonRecord, Result
from engine.core.texts import counted

S = TypeVar("S", bound=StampedRecord)

_OUTCOMES: dict[int, Outcome] = {
    ExitCode.OK: "recovered",
    ExitCode.STOPPED_RESUMABLE: "resumable",
    ExitCode.STATE_LOST: "state-lost",
}
_INTERRUPTED = "the run was interrupted"
# The run did not begin, or was interrupted: it proves nothing about the case.
_NOT_RUN = BY_SIGNAL | {ExitCode.USAGE, ExitCode.ENVIRONMENT, ExitCode.COORDINATOR_UNAVAILABLE, ExitCode.STORAGE}


@dataclass(frozen=True, slots=True)
class Check:
    """One expectation, its result, and the reason in words."""

    name: str
    result: Result
    text: str


@dataclass(frozen=True)  # without slots, which a cached property cannot have
class Observed:
    """A run that has ended: its exit code, error and history, the comparison with its twin, the leftovers.

    `twin` is an error if the twin failed. `twin` and `leftovers` are None if they were not checked. Only events since
    `since_ns` (the host's monotonic clock) are judged; earlier events show the owners.
    """

    exit_code: int
    error: str
    history: RunHistory
    twin: ComparisonRecord | BambooError | None = None
    leftovers: Sequence[str] | None = None
    since_ns: int = 0

    def of(self, kind: type[S]) -> list[S]:
        """Returns the judged records of one kind."""
        return [each for each in self.history.of(kind) if each.at_ns >= self.since_ns]

    def strikes(self, fault: Fault) -> list[FaultRecord]:
        """Returns the strikes of a fault, one record for each victim."""
        return [each for each in self.of(FaultRecord) if each.fault == fault.id]

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """The recoveries that began since `since_ns`; to find them takes longer than to read the events."""
        return [each for each in recoveries(self.history.records_of_recoveries) if each.noticed_ns >= self.since_ns]

    def miscounted(self, job: Job) -> list[str]:
        """Returns one sentence for each sample that a judged step did not count once."""
        return miscounted(self.history, job, self.since_ns)


def check(
    expect: Expect, job: Job, faults: Sequence[Fault], kinds: Mapping[str, FaultKind], seen: Observed
) -> tuple[Check, ...]:
    """Returns a check for each expectation; the first one is that the faults struck, if there are any."""
    found = seen.recoveries
    checks = [*([_struck(faults, seen)] if faults else []), _outcome(expect, seen)]
    if expect.trajectory is not None:
        checks.append(_trajectory(expect.trajectory, seen))
    if expect.steps_lost is not None:
        lost = sum(each.lost_steps for each in found)
        checks.append(_judged("steps_lost", lost <= expect.steps_lost, f"{lost} lost, {expect.steps_lost} at most"))
    if expect.samples is not None:
        wrong = seen.miscounted(job)
        text = "every committed step counted every sample once"
        if left_out := sum(last + 1 - first for first, last in left_out_steps(seen.history)):
            text += f"; {counted(left_out, 'step')} not checked, as their actions were left out"
        checks.append(_judged("samples", not wrong, _first(wrong) or text))
    if expect.culprit is not None:
        checks.append(_culprit(expect.culprit, faults, kinds, seen))
    if expect.leftovers is not None:
        checks.append(_leftovers(seen))
    if expect.recovery is not None:
        checks += _limits(expect.recovery, found)
    return tuple(checks)


def verdict(checks: Sequence[Check]) -> Result:
    """Returns the result of the worst check, where failed is worse than invalid.

    A run that fails often ends before its last fault could strike. The failure is the finding, not the missed fault.
    """
    results = {each.result for each in checks}
    return "failed" if "failed" in results else "passed" if results <= {"passed"} else "invalid"


def decided(checks: Sequence[Check], seen: Observed) -> tuple[Check, ...]:
    """Returns the checks after a signal to the run or its twin: a check that it left undecided is not judged.

    A failed check is decided. If only the twin was interrupted, a passed one is too. If the run was, only the strikes
    are, once every fault has struck: nothing else passes because the run did not get there.
    """
    is_whole = seen.exit_code not in BY_SIGNAL
    has_struck = any(each.name == "faults" and each.result == "passed" for each in checks)

    def judged(each: Check) -> Check:
        is_known = is_whole or (has_struck and each.name in ("faults", "precision"))
        if each.result == "failed" or (each.result == "passed" and is_known):
            return each
        return replace(each, result="not judged", text=each.text if is_whole else _INTERRUPTED)

    return tuple(map(judged, checks))


def exit_code(checks: Sequence[Check], seen: Observed) -> ExitCode:
    """Returns the exit code of a case."""
    outcome = next(each.result for each in checks if each.name == "outcome")
    if outcome == "invalid":
        return ExitCode(seen.exit_code)
    twin = seen.twin
    if isinstance(twin, BambooError) and twin.exit_code in BY_SIGNAL and verdict(checks) != "failed":
        return ExitCode(twin.exit_code)
    worst = next((each.name for each in checks if each.result == verdict(checks)), "")
    if worst == "trajectory" and isinstance(twin, BambooError):
        return ExitCode(twin.exit_code)
    if outcome == "failed" and seen.exit_code:
        return ExitCode.STATE_LOST if seen.exit_code == ExitCode.STATE_LOST else ExitCode.NOT_RECOVERED
    return {
        "passed": ExitCode.OK,
        "failed": ExitCode.EXPECTATION_FAILED,
        "invalid": ExitCode.INVALID_CASE,
    }[verdict(checks)]


def _judged(name: str, good: bool, text: str) -> Check:
    return Check(name, "passed" if good else "failed", text)


def _first(texts: Sequence[str]) -> str:
    return texts[0] + (f", and {len(texts) - 1} more" if len(texts) > 1 else "") if texts else ""


def _struck(faults: Sequence[Fault], seen: Observed) -> Check:
    """Checks that every fault struck all its victims and that its effect was seen."""
    wrong = [why for fault in faults if (why := why_not_struck(fault, seen))]
    text = "; ".join(wrong) or (f"{len(faults)} faults struck" if len(faults) != 1 else "the fault struck")
    missed = [fault.moment for fault in faults if not seen.strikes(fault)]
    if len(missed) < len(faults) and any(isinstance(moment, At) and moment.is_half for moment in missed):
        text += f" ({WHOLE_AFTERWARDS})"
    return Check("faults", "invalid" if wrong else "passed", text)


def why_not_struck(fault: Fault, seen: Observed) -> str:
    """Returns why a fault proves nothing: it struck too few victims, or its effect was not seen; else an empty text."""
    victims = {each.of for each in seen.strikes(fault)}
    if not victims:
        return f"{fault.id} did not strike ({fault.in_words(seen.history.job.slot_noun)})"
    if len(victims) < len(fault.victims):
        return f"{fault.id} struck {len(victims)} of {len(fault.victims)}"
    if all(each.fault != fault.id for each in seen.of(ConfirmedRecord)):
        return f"{fault.id} struck, but its effect was not seen ({fault.do})"
    return ""


def why_no_twin(expect: Expect, faults: Sequence[Fault], seen: Observed) -> str:
    """Returns why a run cannot be compared with its twin, or has no need to; empty if it must be compared."""
    if seen.exit_code in BY_SIGNAL:
        return _INTERRUPTED
    if expect.trajectory is None:
        return "no twin was asked for"
    if _outcome(expect, seen).result != "passed":
        return "the run did not end as expected"
    return "no fault struck" if faults and not any(map(seen.strikes, faults)) else ""


def _outcome(expect: Expect, seen: Observed) -> Check:
    why = f": {seen.error.splitlines()[0]}" if seen.error else ""
    if seen.exit_code in BY_SIGNAL:
        return Check("outcome", "invalid", _INTERRUPTED)
    if seen.exit_code in _NOT_RUN:
        return Check("outcome", "invalid", f"the run ended with exit code {seen.exit_code}{why}")
    expected = _with_notice(expect.outcome, expect.notice or "")
    notice = next((each.notice for each in seen.of(FailedRecord) if each.notice), "") if seen.exit_code else ""
    outcome = _with_notice("noticed", notice) if notice else _OUTCOMES.get(seen.exit_code, "not recovered")
    text = outcome if outcome == expected else f"{outcome}, but {expected} was expected{why}"
    return _judged("outcome", outcome == expected, text)


def _with_notice(outcome: str, notice: str) -> str:
    return f"{outcome} ({notice})" if notice else outcome


def _trajectory(expected: Agreement, seen: Observed) -> Check:
    """Checks that no hash differs; `identical` also needs the last commit of a finished run in the comparison."""
    found = seen.twin
    if not isinstance(found, ComparisonRecord):
        missing = _INTERRUPTED if seen.exit_code in BY_SIGNAL else "there is no twin to compare with"
        return Check("trajectory", "invalid", f"not compared: {str(found or missing).splitlines()[0]}")
    if found.difference is not None:
        return Check("trajectory", "failed", str(found))
    committed = max((each.step for each in seen.of(CommitRecord)), default=-1)
    if expected == "identical" and found.last_step < committed and not seen.exit_code:
        return Check("trajectory", "invalid", f"compared up to step {found.last_step}, committed up to {committed}")
    if not found.compared:
        return Check("trajectory", "invalid", "no step could be compared")
    return Check("trajectory", "passed", f"identical in {found.compared} of {found.steps} steps")


def _culprit(
    expected: Literal["exact", "nobody"], faults: Sequence[Fault], kinds: Mapping[str, FaultKind], seen: Observed
) -> Check:
    """Checks that each excluded worker was struck, and that each victim of a fault that ends a worker was excluded."""
    struck = {each.of for each in seen.of(FaultRecord)} if expected == "exact" else set()
    ending = {fault.id for fault in faults if expected == "exact" and kinds[fault.do].ends}
    must = {each.of for each in seen.of(FaultRecord) if each.fault in ending}
    out = {each.worker for epoch in seen.of(EpochRecord) for each in epoch.verdict}
    out |= {each.of for each in seen.of(ExitRecord) if not each.expected}
    gone = out | {each.of for each in seen.of(NoticeRecord)}
    if seen.exit_code:  # a run that halts gives no further verdict
        gone |= {each.of for each in seen.of(ExitRecord) if each.code}
    wrong = [f"worker {worker} was put out, and should not have been" for worker in sorted(out - struck)]
    wrong += [f"worker {worker} was struck, and no verdict names it" for worker in sorted(must - gone)]
    named = ", ".join(str(worker) for worker in sorted(out & struck)) or "nobody"
    return _judged("culprit", not wrong, _first(wrong) or f"put out: {named}")


def _leftovers(seen: Observed) -> Check:
    if seen.leftovers is None:
        return Check("leftovers", "invalid", "not checked")
    return _judged("leftovers", not seen.leftovers, _first(seen.leftovers) or "none")


def _limits(limits: Limits, found: Sequence[Recovery]) -> Iterator[Check]:
    stalls = [each.stall for each in found if each.stall and each.resume_ns is not None]
    if not stalls:
        yield Check("recovery", "invalid", "there was no recovery to time")
        return
    for name, part, limit_ns in (("p95", 0.95, limits.p95_ns), ("max", 1.0, limits.max_ns)):
        if limit_ns is not None:
            yield _short_enough(f"recovery.{name}", quantile(stalls, part), limit_ns)
    for phase, limit in limits.phases_ns.items():
        taken = [each.phases_ns[phase] for each in found if phase in each.phases_ns]
        name = f"recovery.phases.{phase}"
        yield _within(name, max(taken), limit) if taken else Check(name, "invalid", "no recovery had this phase")


def _short_enough(name: str, stall: Stall, limit_ns: int) -> Check:
    """Checks a limit of stalls; what lies between the bounds of a stall cannot be judged."""
    text = f"training stalled for {stall}; {duration_text(limit_ns)} allowed"
    if stall.least_ns <= limit_ns and (stall.most_ns is None or stall.most_ns > limit_ns):
        return Check(name, "invalid", text)
    return _judged(name, stall.least_ns <= limit_ns, text)


def _within(name: str, taken_ns: int, limit_ns: int) -> Check:
    return _judged(name, taken_ns <= limit_ns, f"{taken_ns / 1e6:.1f} ms, {duration_text(limit_ns)} at most")
