"""Checks the expectations of a scenario against an observed run, and gives the verdict of the case.

Rules: pure. A fault that did not strike, or whose effect was not seen, makes the case invalid, because the case proved
nothing. An expectation that could not be checked makes it invalid too. An invalid case never passes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from operator import attrgetter
from typing import Any, Literal, Protocol, TypeVar

from engine.core.action import Op
from engine.core.checks.recoveries import Recovery, Stall, quantile, recoveries
from engine.core.checks.samples import miscounted
from engine.core.errors import BY_SIGNAL, KILLED, BambooError, ExitCode
from engine.core.faults.fault import (
    AT_ONCE,
    HARMLESS,
    LOSES_A_HOST,
    WHOLE_AFTERWARDS,
    At,
    Fault,
    FaultKind,
    Worker,
    ends,
    slot_owner,
)
from engine.core.faults.scenario import Agreement, Expect, Limits, Outcome
from engine.core.history.process_records import (
    ComparisonRecord,
    ExitRecord,
    FailedRecord,
    HostRecord,
    RestartRecord,
    Result,
    ResumedRecord,
    StartedRecord,
)
from engine.core.history.run_history import RunHistory, left_out_steps
from engine.core.history.run_records import (
    AGENT,
    ActionRecord,
    CommitRecord,
    ConfirmedRecord,
    EpochRecord,
    FaultRecord,
    NoticeRecord,
    StampedRecord,
)
from engine.core.job.job import Job
from engine.core.job.partition import initial_program
from engine.core.texts import counted, numbered
from engine.core.units import duration_text

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


@dataclass(frozen=True, slots=True)
class HostStrike:
    """A fault has struck host `node` in `step`, with `workers` on it at that time.

    `ended_ns` is the time until the struck processes had ended, `spare_ns` from then until the lease of a host that was
    cut off could expire; None if unknown.
    """

    fault: Fault
    node: str
    step: int
    at_ns: int
    workers: tuple[int, ...]
    ended_ns: int | None = None
    spare_ns: int | None = None

    @property
    def loses_host(self) -> bool:
        """Whether the run loses the host by it."""
        return self.fault.do in LOSES_A_HOST

    @property
    def lost(self) -> tuple[int, ...]:
        """The workers that are lost by it."""
        struck = tuple(each.worker for each in self.fault.victims if isinstance(each, Worker))
        return struck or (self.workers if self.loses_host else ())

    def records(self) -> Iterator[FaultRecord | ConfirmedRecord]:
        """Yields the records of the strike: one for each worker that is lost, and one for its effect."""
        stamp: dict[str, Any] = {"worker": AGENT, "at_ns": self.at_ns, "fault": self.fault.id}
        for worker in self.lost:
            yield FaultRecord(**stamp, do=self.fault.do, step=self.step, of=worker, slot=None)
        if self.ended_ns is not None:
            stamp["at_ns"] += self.ended_ns
            yield ConfirmedRecord(**stamp, how=f"{self.fault.do} {self.node}, from outside")


@dataclass(frozen=True, slots=True)
class OutsideView:
    """What was seen from outside of all hosts: the strikes, the exit codes of the agents by host, and the lease."""

    strikes: Sequence[HostStrike]
    codes: Mapping[str, int]
    lease_ns: int


@dataclass(frozen=True)  # without slots, which a cached property cannot have
class Observation:
    """A run that has ended: its exit code, error and history, the comparison with its twin, the leftovers.

    `twin` is an error if the twin failed. `twin` and `leftovers` are None if they were not checked. Only events since
    `since_ns` (the host's monotonic clock) are judged; earlier ones only show the owners. `outside` is None unless
    hosts could be struck.
    """

    exit_code: int
    error: str
    history: RunHistory
    twin: ComparisonRecord | BambooError | None = None
    leftovers: Sequence[str] | None = None
    since_ns: int = 0
    outside: OutsideView | None = None

    def of(self, kind: type[S]) -> list[S]:
        """Returns the judged records of one kind."""
        return [each for each in self.history.of(kind) if each.at_ns >= self.since_ns]

    def strikes(self, fault: Fault) -> list[FaultRecord]:
        """Returns the strikes of a fault, one record for each victim."""
        return [strike for strike in self.of(FaultRecord) if strike.fault == fault.id]

    @property
    def host_strikes(self) -> Sequence[HostStrike]:
        """The strikes from outside of all hosts."""
        return self.outside.strikes if self.outside else ()

    def host_strike(self, fault: Fault) -> HostStrike | None:
        """Returns the strike of a fault from outside of its host; None without one."""
        return next((strike for strike in self.host_strikes if strike.fault.id == fault.id), None)

    def has_struck(self, fault: Fault) -> bool:
        """Returns whether a fault has struck, be it a worker, a host, or a member of etcd."""
        return bool(self.strikes(fault)) or self.host_strike(fault) is not None

    @cached_property
    def recoveries(self) -> list[Recovery]:
        """The recoveries that began since `since_ns`; finding them takes longer than reading the events."""
        return [each for each in recoveries(self.history.records_of_recoveries) if each.noticed_ns >= self.since_ns]

    def miscounted(self, job: Job) -> list[str]:
        """Returns one sentence for each sample that a judged step did not count once."""
        return miscounted(self.history, job, self.since_ns)


def check(
    expect: Expect, job: Job, faults: Sequence[Fault], kinds: Mapping[str, FaultKind], run: Observation
) -> tuple[Check, ...]:
    """Returns a check for each expectation; first that the faults struck, and last those of struck hosts, if any."""
    checks = [_struck(faults, run)] if faults else []
    checks += _host_checks(run.outside, run) if run.outside else ()
    checks.append(_outcome(expect, run))
    if expect.trajectory is not None:
        checks.append(_trajectory(expect.trajectory, run))
    if expect.steps_lost is not None:
        lost = sum(recovery.lost_steps for recovery in run.recoveries)
        checks.append(judged("steps_lost", lost <= expect.steps_lost, f"{lost} lost, {expect.steps_lost} at most"))
    if expect.samples is not None:
        wrong = run.miscounted(job)
        text = "every committed step counted every sample once"
        if left_out := sum(last + 1 - first for first, last in left_out_steps(run.history)):
            text += f"; {counted(left_out, 'step')} not checked, as their actions were left out"
        checks.append(judged("samples", not wrong, _first(wrong) or text))
    if expect.culprit is not None:
        checks.append(_culprit(expect.culprit, faults, kinds, run))
    if expect.leftovers is not None:
        left = run.leftovers
        unknown = Check("leftovers", "invalid", "not checked")
        checks.append(unknown if left is None else judged("leftovers", not left, _first(left) or "none"))
    if expect.recovery is not None:
        checks += limit_checks(expect.recovery, run.recoveries)
    if faults and verdict(checks) == "passed":
        is_unmoved = not run.exit_code and not run.host_strikes and all(each.epoch == 1 for each in run.of(EpochRecord))
        notes = holds_anyway(expect, job, {fault.do for fault in faults}, kinds, is_unmoved=is_unmoved)
        checks[0] = replace(checks[0], text="; ".join([checks[0].text, *notes]))
    return tuple(checks)


def holds_anyway(
    expect: Expect, job: Job, done: Set[str], kinds: Mapping[str, FaultKind], *, is_unmoved: bool = False
) -> list[str]:
    """Names the expectations that a run without any fault meets and these kinds cannot break, in a sentence.

    In a run that `is_unmoved`, no member was lost or replaced by them.
    """
    usual = {
        "outcome recovered": expect.outcome == "recovered",
        f"trajectory {expect.trajectory}": expect.trajectory is not None,
        f"steps_lost {expect.steps_lost}": expect.steps_lost is not None,
        "samples exactly-once": expect.samples is not None,
        f"culprit {expect.culprit}": expect.culprit is not None,
        "leftovers none": expect.leftovers is not None,
    }
    if not is_unmoved and not done <= HARMLESS | {"noop-host"}:
        usual = {
            f"steps_lost {expect.steps_lost}": expect.steps_lost is not None and 0 < job.steps <= expect.steps_lost,
            "culprit exact": expect.culprit == "exact" and not any(ends(do, kinds) for do in done),
        }
    named = [name for name, holds in usual.items() if holds]
    if not named:
        return []
    which = "this expectation holds" if len(named) == 1 else "these expectations hold"
    return [f"{which} without any fault: {', '.join(named)}"]


def verdict(checks: Sequence[Check]) -> Result:
    """Returns the result of the worst check; failed is worse than invalid, as a failed run may end before a fault."""
    results = {each.result for each in checks}
    return "failed" if "failed" in results else "passed" if results <= {"passed"} else "invalid"


def decided(checks: Sequence[Check], run: Observation) -> tuple[Check, ...]:
    """Returns the checks after a signal to the run or its twin, without those that it left undecided.

    A failed check is decided. If only the twin was interrupted, a passed one is too; if the run was, only the strikes
    are, once every fault has struck.
    """
    is_whole = run.exit_code not in BY_SIGNAL
    has_struck = any(each.name == "faults" and each.result == "passed" for each in checks)

    def decision(check: Check) -> Check:
        is_known = is_whole or (has_struck and check.name in ("faults", "precision"))
        if check.result == "failed" or (check.result == "passed" and is_known):
            return check
        return replace(check, result="not judged", text=check.text if is_whole else _INTERRUPTED)

    return tuple(map(decision, checks))


def exit_code(checks: Sequence[Check], run: Observation) -> ExitCode:
    """Returns the exit code of a case."""
    outcome = next(each.result for each in checks if each.name == "outcome")
    if outcome == "invalid":
        return ExitCode(run.exit_code)
    twin = run.twin
    if isinstance(twin, BambooError) and twin.exit_code in BY_SIGNAL and verdict(checks) != "failed":
        return ExitCode(twin.exit_code)
    worst = next((each.name for each in checks if each.result == verdict(checks)), "")
    if worst == "trajectory" and isinstance(twin, BambooError):
        return ExitCode(twin.exit_code)
    if outcome == "failed" and run.exit_code:
        return ExitCode.STATE_LOST if run.exit_code == ExitCode.STATE_LOST else ExitCode.NOT_RECOVERED
    return {"passed": ExitCode.OK, "failed": ExitCode.EXPECTATION_FAILED, "invalid": ExitCode.INVALID_CASE}[
        verdict(checks)
    ]


def judged(name: str, good: bool, text: str) -> Check:
    """Returns a check that has passed or failed."""
    return Check(name, "passed" if good else "failed", text)


def _first(texts: Sequence[str]) -> str:
    return texts[0] + (f", and {len(texts) - 1} more" if len(texts) > 1 else "") if texts else ""


def _struck(faults: Sequence[Fault], run: Observation) -> Check:
    """Checks that every fault struck all its victims and that its effect was seen."""
    wrong = [why for fault in faults if (why := why_not_struck(fault, run))]
    hosts = ", ".join(f"{each.fault.do} {each.node} in step {each.step}" for each in run.host_strikes)
    text = "; ".join(wrong) or hosts or (f"{len(faults)} faults struck" if len(faults) != 1 else "the fault struck")
    missed = [fault.moment for fault in faults if not run.has_struck(fault)]
    if len(missed) < len(faults) and any(isinstance(moment, At) and moment.is_half for moment in missed):
        text += f" ({WHOLE_AFTERWARDS})"
    return Check("faults", "invalid" if wrong else "passed", text)


def why_not_struck(fault: Fault, run: Observation) -> str:
    """Returns why a fault proves nothing: it struck too few victims, or its effect was not seen; else an empty text."""
    if not run.has_struck(fault):
        return f"{fault.id} did not strike ({fault.in_words(run.history.job.slot_noun)})"
    if (host := run.host_strike(fault)) is not None:
        is_seen = host.ended_ns is not None
    else:
        victims = {each.of for each in run.strikes(fault)}
        if len(victims) < len(fault.victims):
            return f"{fault.id} struck {len(victims)} of {len(fault.victims)}"
        is_seen = any(each.fault == fault.id for each in run.of(ConfirmedRecord))
    return "" if is_seen else f"{fault.id} struck, but its effect was not seen ({fault.do})"


def why_no_twin(expect: Expect, faults: Sequence[Fault], run: Observation) -> str:
    """Returns why a run cannot be compared with its twin, or has no need to; empty if it must be compared."""
    if run.exit_code in BY_SIGNAL:
        return _INTERRUPTED
    if expect.trajectory is None:
        return "no twin was asked for"
    if _outcome(expect, run).result != "passed":
        return "the run did not end as expected"
    return "no fault struck" if faults and not any(map(run.has_struck, faults)) else ""


def _outcome(expect: Expect, run: Observation) -> Check:
    why = f": {run.error.splitlines()[0]}" if run.error else ""
    if run.exit_code in BY_SIGNAL:
        return Check("outcome", "invalid", _INTERRUPTED)
    if run.exit_code in _NOT_RUN:
        return Check("outcome", "invalid", f"the run ended with exit code {run.exit_code}{why}")
    expected = _with_notice(expect.outcome, expect.notice or "")
    notice = next((each.notice for each in run.of(FailedRecord) if each.notice), "") if run.exit_code else ""
    outcome = _with_notice("noticed", notice) if notice else _OUTCOMES.get(run.exit_code, "not recovered")
    text = outcome if outcome == expected else f"{outcome}, but {expected} was expected{why}"
    return judged("outcome", outcome == expected, text)


def _with_notice(outcome: str, notice: str) -> str:
    return f"{outcome} ({notice})" if notice else outcome


def _trajectory(expected: Agreement, run: Observation) -> Check:
    """Checks that no hash differs; `identical` also needs the last commit of a finished run in the comparison."""
    twin = run.twin
    if not isinstance(twin, ComparisonRecord):
        missing = _INTERRUPTED if run.exit_code in BY_SIGNAL else "there is no twin to compare with"
        return Check("trajectory", "invalid", f"not compared: {str(twin or missing).splitlines()[0]}")
    if twin.difference is not None:
        return Check("trajectory", "failed", str(twin))
    committed = max((commit.step for commit in run.of(CommitRecord)), default=-1)
    if expected == "identical" and twin.last_step < committed and not run.exit_code:
        return Check("trajectory", "invalid", f"compared up to step {twin.last_step}, committed up to {committed}")
    if not twin.compared:
        return Check("trajectory", "invalid", "no step could be compared")
    return Check("trajectory", "passed", f"identical in {twin.compared} of {twin.steps} steps")


def _culprit(
    expected: Literal["exact", "nobody"], faults: Sequence[Fault], kinds: Mapping[str, FaultKind], run: Observation
) -> Check:
    """Checks that every evicted worker was struck, and that every victim of a fault that ends a worker was evicted."""
    struck = {each.of for each in run.of(FaultRecord)} if expected == "exact" else set()
    ending = {fault.id for fault in faults if expected == "exact" and kinds[fault.do].ends}
    must = {each.of for each in run.of(FaultRecord) if each.fault in ending}
    out = {each.worker for epoch in run.of(EpochRecord) for each in epoch.verdict}
    out |= {each.of for each in run.of(ExitRecord) if not each.expected}
    gone = out | {each.of for each in run.of(NoticeRecord)}
    if run.exit_code:  # a run that halts gives no further verdict
        gone |= {each.of for each in run.of(ExitRecord) if each.code}
    wrong = [f"worker {worker} was evicted, and should not have been" for worker in sorted(out - struck)]
    wrong += [f"worker {worker} was struck, and no verdict names it" for worker in sorted(must - gone)]
    named = numbered("worker", sorted(out & struck)) if out & struck else "nobody"
    return judged("culprit", not wrong, _first(wrong) or f"evicted: {named}")


class TimedRecovery(Protocol):
    """A recovery with the times that limits are about."""

    @property
    def stall(self) -> Stall | None:
        """The time that training stalled, if it is known."""

    @property
    def resume_ns(self) -> int | None:
        """When training resumed, if it did."""

    @property
    def phases_ns(self) -> Mapping[str, int]:
        """The time that each phase took."""


def limit_checks(limits: Limits, recoveries: Sequence[TimedRecovery]) -> Iterator[Check]:
    """Yields the check of each limit."""
    stalls = [each.stall for each in recoveries if each.stall and each.resume_ns is not None]
    if not stalls:
        yield Check("recovery", "invalid", "there was no recovery to time")
        return
    for name, part, limit_ns in (("p95", 0.95, limits.p95_ns), ("max", 1.0, limits.max_ns)):
        if limit_ns is not None:
            yield _short_enough(f"recovery.{name}", quantile(stalls, part), limit_ns)
    for phase, limit in limits.phases_ns.items():
        longest_ns = max((each.phases_ns[phase] for each in recoveries if phase in each.phases_ns), default=None)
        name = f"recovery.phases.{phase}"
        if longest_ns is None:
            yield Check(name, "invalid", "no recovery had this phase")
        else:
            text = f"{longest_ns / 1e6:.1f} ms, {duration_text(limit)} at most"
            yield judged(name, longest_ns <= limit, text)


def _short_enough(name: str, stall: Stall, limit_ns: int) -> Check:
    """Checks a limit of stalls; what lies between the bounds of a stall cannot be judged."""
    text = f"training stalled for {stall}; {duration_text(limit_ns)} allowed"
    if stall.least_ns <= limit_ns and (stall.most_ns is None or stall.most_ns > limit_ns):
        return Check(name, "invalid", text)
    return judged(name, stall.least_ns <= limit_ns, text)


# Checks of a run whose hosts were struck: one epoch for each host lost, the other processes go on, who ended how.
#
# Rule: the times of strikes and ends were taken outside of the hosts, by one clock.

# A member of etcd that is cut off may lead for two election timeouts, and answers renewals meanwhile. The next leader
# begins all leases afresh, later than that, so the last answered renewal still tells when a lease could expire.
_STILL_LEADS_NS = 2_000_000_000


def _host_checks(view: OutsideView, run: Observation) -> Iterator[Check]:
    """Yields the checks of the hosts; an interrupted run leaves all of them undecided."""
    cut = [strike for strike in view.strikes if strike.fault.do == "cut-host"]
    checks = [
        _epochs(view.strikes, run.history),
        _processes(view.strikes, run.history),
        _agents(view.strikes, view.codes),
        *([_lease(cut, view.lease_ns)] if cut else []),
    ]
    for each in checks:
        yield replace(each, result="not judged", text=_INTERRUPTED) if run.exit_code in BY_SIGNAL else each


def _judged_hosts(name: str, wrong: Sequence[str], text: str) -> Check:
    return Check(name, "failed" if wrong else "passed", "; ".join(wrong) or text)


def _epochs(strikes: Sequence[HostStrike], history: RunHistory) -> Check:
    """Checks that each lost host is one epoch, whose verdict names its workers and no others."""
    verdicts = [sorted(out.worker for out in epoch.verdict if out.is_loss) for epoch in history.of(EpochRecord)]
    evicted = list(filter(None, verdicts))
    lost = [sorted(strike.lost) for strike in strikes if strike.lost]
    wrong = [f"no epoch evicts {_named(workers)}" for workers in lost if workers not in evicted]
    wrong += [f"an epoch evicts {_named(workers)}, which no fault did" for workers in evicted if workers not in lost]
    if len(evicted) != len(lost) and not wrong:
        wrong = [f"{counted(len(evicted), 'epoch')} for {counted(len(lost), 'loss', 'losses')}"]
    text = ", then ".join(f"one epoch evicts {_named(workers)}" for workers in evicted)
    return _judged_hosts("epochs", wrong, text or "no epoch evicts a worker")


def _processes(strikes: Sequence[HostStrike], history: RunHistory) -> Check:
    """Checks that the workers that were not struck are the same processes from start to end."""
    workers: dict[int, set[tuple[str, int]]] = {}
    for started in history.of(StartedRecord):
        workers.setdefault(started.of, set()).add((started.node, started.child))
    wrong = [f"worker {of} was {len(starts)} processes" for of, starts in sorted(workers.items()) if len(starts) > 1]
    wrong += ["all workers were restarted"] * bool(history.of(RestartRecord))
    survivors = workers.keys() - {worker for strike in strikes for worker in strike.lost}
    return _judged_hosts("processes", wrong, f"{len(survivors)} of {len(workers)} workers kept running")


def _agents(strikes: Sequence[HostStrike], codes: Mapping[str, int]) -> Check:
    """Checks that the agents of struck hosts ended as they must, and all others with one code."""
    due = {
        strike.node: int(ExitCode.FENCED) if strike.fault.do == "cut-host" else KILLED
        for strike in strikes
        if strike.loses_host
    }
    wrong = [
        f"the agent of {node} ended with {codes.get(node)}, not {code}"
        for node, code in due.items()
        if codes.get(node) != code
    ]
    others = {node: code for node, code in codes.items() if node not in due}
    if len(set(others.values())) > 1:
        wrong.append("agents ended with several codes: " + ", ".join(f"{node} {code}" for node, code in others.items()))
    text = ", ".join(f"{node} with {code}" for node, code in {**others, **due}.items())
    return _judged_hosts("agents", wrong, text)


def _lease(cut: Sequence[HostStrike], lease_ns: int) -> Check:
    """Checks that the workers of hosts that were cut off had ended before their leases could expire."""
    wrong: list[str] = []
    right: list[str] = []
    for strike in cut:
        ended_ns, spare_ns = strike.ended_ns, strike.spare_ns
        if ended_ns is None or spare_ns is None:
            wrong.append(f"it is not known when the workers of {strike.node} had ended, or when its lease could expire")
            continue
        text = f"the workers of {strike.node} had ended {ended_ns / 1e9:.3f} s after the cut"
        text += f", {abs(spare_ns) / 1e9:.3f} s {'after' if spare_ns <= 0 else 'before'} its lease could expire"
        (wrong if ended_ns > lease_ns + _STILL_LEADS_NS or spare_ns <= 0 else right).append(text)
    return _judged_hosts("lease", wrong, "; ".join(right))


def _named(workers: Sequence[int]) -> str:
    return numbered("worker", workers, " and ")


# Checks in the victim's records that a fault struck at the action that its scenario names.
#
# Rules: with `after`, the victim's last record before the strike is the named action. With `before` and `during`, it is
# the action before the named one in the victim's program. A victim that ends at once records no later action, except
# the action during which it was struck. A recovery changes the program, so from then on only the named action is
# checked. A victim on another host has its records and its clock there: then its own report of its last action counts.


def strike_accuracy(job: Job, faults: Sequence[Fault], history: RunHistory) -> Iterator[Check]:
    """Yields the check that each fault with a named action struck the slot's owner there, if any such fault struck."""
    by_id = {fault.id: fault for fault in faults}
    wrong: list[str] = []
    number = 0
    for strike in history.of(FaultRecord):
        fault = by_id.get(strike.fault)
        if fault is None or not isinstance(fault.moment, At):
            continue
        victim = slot_owner(fault.moment.action)
        if victim not in fault.victims or strike.slot != (victim.pipeline, victim.stage):
            continue  # a further victim: only the owner is at the named action
        number += 1
        wrong += _misses(job, fault, fault.moment, strike, history)
    text = wrong[0] if wrong else f"{counted(number, 'fault')} struck at the planned action"
    if number:
        yield Check("precision", "failed" if wrong else "passed", text)


def _misses(job: Job, fault: Fault, moment: At, strike: FaultRecord, history: RunHistory) -> Iterator[str]:
    mine = [each for each in history.of(ActionRecord) if each.worker == strike.of]
    mine.sort(key=attrgetter("end_ns"))
    before = [(each.step, each.action) for each in mine if each.end_ns <= strike.at_ns]
    if strike.node and (strike.node, strike.pid) not in [(each.node, each.pid) for each in history.of(HostRecord)]:
        mine, before = [], [(strike.done_step, strike.done)] if strike.done else []
    restarts = (*history.of(RestartRecord), *history.of(ResumedRecord))
    # From then on another process is this worker.
    until_ns = min((each.at_ns for each in restarts if each.at_ns >= strike.at_ns), default=inf)
    later = [(each.step, each.action) for each in mine if strike.at_ns < each.end_ns <= until_ns]
    named = (moment.step, str(moment.action))
    victim = f"{fault.id}: worker {strike.of}"
    last = before[-1] if before else None
    if moment.when == "after" and moment.action.op is not Op.CHECKPOINT:
        if last != named:
            yield f"{victim} was to be struck after {_text(named)}, and had done {_text(last)} last"
    else:
        is_first = not any(each.epoch > 1 and each.at_ns <= strike.at_ns for each in history.epochs)
        expected = _previous(job, moment, strike.of) if is_first else None
        if named in before or (is_first and last != expected):
            yield (
                f"{victim} was to be struck {moment.when} {_text(named)}, and had done {_text(last)} last"
                + (f" instead of {_text(expected)}" if is_first else "")
            )
    allowed = [named] if moment.when == "during" else []
    if fault.do in AT_ONCE and later not in ([], allowed):
        yield f"{victim} was struck {moment.when} {_text(named)}, and continued to {_text(later[-1])}"


def _previous(job: Job, moment: At, worker: int) -> tuple[int, str] | None:
    """Returns (step, action) before the named one in a worker's program; it may be in the step before."""
    program, _ = initial_program(job)
    own = [str(action) for action in program[worker]]
    if moment.action.op is Op.CHECKPOINT:  # behind the last action of its step, and itself no record
        return moment.step, own[-1]
    place = own.index(str(moment.action))
    if place:
        return moment.step, own[place - 1]
    return (moment.step - 1, own[-1]) if moment.step else None


def _text(at: tuple[int, str] | None) -> str:
    return f"{at[1]} of step {at[0]}" if at else "nothing"
