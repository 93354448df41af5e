"""A job of another launcher, seen from outside: its events, its recoveries, and the checks of its expectations.

Rules:
- All times are nanoseconds on the host's monotonic clock. A report of a step has the time at which the rank made it.
- A recovery begins with a strike. Strikes before all struck ranks report again, or the others have trained on, belong
  to it. It ends with the first report after the longest gap between the reports of all ranks up to then; if a struck
  rank does not come back, over a few steps of the others.
- The stall is this gap less a usual step: the median of the last steps of each process before the strike.
- Each phase counts only its time after the end of the phase before, so the phases add up to the time from the strike
  to the first step. A phase that was not seen is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Any, Literal

from engine.core.checks.expectations import Check, judged, limit_checks, verdict
from engine.core.checks.external_verdict import ExternalVerdict, JobReports, StateReport, StepReport
from engine.core.checks.recoveries import USUAL, Stall
from engine.core.errors import BY_SIGNAL, ExitCode
from engine.core.faults.external import ExternalFault, ExternalScenario
from engine.core.texts import counted, numbered

_PHASE_WORDS = {
    "still": "ranks stand still after",
    "notice": "launcher notices after",
    "end": "ranks end after",
    "begin": "ranks begin again after",
    "step": "first step after",
}
EndReason = Literal["exit", "timeout", "interrupt", "attached", "gone"]
_TRAINS_ON = 3  # steps behind a strike without which the survivors may only have finished the open one
_WARM_UP = 1  # the first step of a process is no usual one


@dataclass(frozen=True, slots=True)
class RankBegan:
    """A process of the job with this rank has begun."""

    at_ns: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankEnded:
    """The process has ended."""

    at_ns: int
    rank: int
    pid: int


@dataclass(frozen=True, slots=True)
class RankStill:
    """The process of this rank has stood still since a time; `why` it is the silent one, empty if it may only wait."""

    at_ns: int
    rank: int
    pid: int
    since_ns: int
    why: str = ""


@dataclass(frozen=True, slots=True)
class StrikeMade:
    """A fault has struck these processes of these ranks; none is there for a strike of the launcher.

    Those that live stand still for the time `for_ns`, 0 if it is not known.
    """

    at_ns: int
    fault: str
    ranks: tuple[int, ...]
    pids: tuple[int, ...]
    for_ns: int = 0


@dataclass(frozen=True, slots=True)
class EffectSeen:
    """The effect of a fault was seen, or `why_not` it could not strike."""

    at_ns: int
    fault: str
    how: str
    why_not: bool = False


@dataclass(frozen=True, slots=True)
class LauncherLine:
    """A line of output with which the launcher notices a failure; `blames` is the rank that it names, or None."""

    at_ns: int
    text: str
    blames: int | None = None


@dataclass(frozen=True, slots=True)
class CommandEnded:
    """The end of the watch over a command, and `why`: its exit code, negative for a signal, None if it is not known."""

    at_ns: int
    code: int | None
    why: EndReason = "exit"


ExternalEvent = RankBegan | RankEnded | RankStill | StepReport | StrikeMade | EffectSeen | LauncherLine | CommandEnded


@dataclass(frozen=True, slots=True)
class ExternalRecovery:
    """What one or more strikes caused; `points_ns` has the end of each phase, `blamed` the ranks that were named.

    `still` are the ranks that stood still in the stall, each with why it is the silent one, or an empty text. Of the
    `struck` ranks, the processes of those that have `ended` did not live on. `lost_steps` were reported before and done
    again; `step` is the newest one before the strike.
    """

    faults: tuple[str, ...]
    struck: tuple[int, ...]
    ended: tuple[int, ...]
    begin_ns: int
    step: int
    points_ns: Mapping[str, int]
    resume_ns: int | None
    stall: Stall | None
    lost_steps: int
    blamed: tuple[int, ...]
    still: Mapping[int, str] = field(default_factory=dict)

    @property
    def silent(self) -> tuple[int, ...]:
        """The ranks that the others waited for, as seen from outside."""
        return tuple(rank for rank, why in self.still.items() if why)

    @property
    def phases_ns(self) -> dict[str, int]:
        """The time that each phase took."""
        phases, reached_ns = {}, self.begin_ns
        for phase, at_ns in sorted(self.points_ns.items(), key=lambda point: point[1]):
            phases[phase] = max(0, at_ns - reached_ns)
            reached_ns = max(reached_ns, at_ns)
        return phases

    def __str__(self) -> str:
        phases = ", ".join(f"{_PHASE_WORDS[name]} {time_ns / 1e6:.0f} ms" for name, time_ns in self.phases_ns.items())
        stall = "no step was reported before" if self.stall is None else f"training stalled for {self.stall}"
        if self.resume_ns is None:
            stall += ", and no step followed"
        lost = f"; {counted(self.lost_steps, 'step')} lost" if self.resume_ns is not None else ""
        blamed = f"; the launcher blames {numbered('rank', self.blamed, ' and ')}" if self.blamed else ""
        silent = "".join(f"; rank {rank} is silent: {self.still[rank]}" for rank in self.silent)
        if self.still and not self.silent:
            silent = f"; {numbered('rank', [*self.still], ' and ')} stood still, and nothing shows which one is silent"
        return f"{' and '.join(self.faults)}: {stall}{f' ({phases})' if phases else ''}{lost}{blamed}{silent}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the recovery as plain values, times in milliseconds."""
        return {
            "faults": list(self.faults),
            "struck": list(self.struck),
            "ended": list(self.ended),
            "blamed": list(self.blamed),
            "silent": list(self.silent),
            "step": self.step,
            "phases_ms": {name: round(time_ns / 1e6, 3) for name, time_ns in self.phases_ns.items()},
            "stall_ms": None if self.stall is None else round(self.stall.least_ns / 1e6, 3),
            "stall_bound": self.stall.bound if self.stall else "",
            "lost_steps": self.lost_steps,
            "resumed": self.resume_ns is not None,
        }


@dataclass(frozen=True, slots=True)
class ExternalRun:
    """One run of a job: its events by time, and the processes left at its end, if known."""

    events: Sequence[ExternalEvent]
    leftovers: Sequence[str] | None = ()
    unread: int = 0  # reports of steps that could not be read
    states: Sequence[StateReport] = ()
    unread_states: int = 0  # reports of states

    def of(self, *kinds: type[Any]) -> list[Any]:
        """Returns the events of these kinds, in the order of their times."""
        return sorted((each for each in self.events if isinstance(each, kinds)), key=lambda event: event.at_ns)

    @property
    def end(self) -> CommandEnded:
        """The end of the command."""
        return next(each for each in reversed(self.events) if isinstance(each, CommandEnded))

    @property
    def reports(self) -> JobReports:
        """All that the job has reported."""
        steps = [each for each in self.events if isinstance(each, StepReport)]
        return JobReports(steps, self.states, self.end.code, self.unread + self.unread_states)

    @property
    def strikes_ns(self) -> list[int]:
        """The times of the strikes."""
        return [each.at_ns for each in self.of(StrikeMade)]

    def recoveries(self) -> list[ExternalRecovery]:
        """Returns the recoveries of the run in their order."""
        strikes, done = self.of(StrikeMade), []
        while strikes:
            group = _Group(self, strikes)
            done.append(group.recovery())
            strikes = strikes[len(group.strikes) :]
        return done


class _Group:
    """The strikes of one recovery, and the reports around it."""

    def __init__(self, run: ExternalRun, strikes: Sequence[StrikeMade]) -> None:
        self.run, self.strikes = run, [strikes[0]]
        self._begin_ns = strikes[0].at_ns
        self._reports: list[StepReport] = run.of(StepReport)
        for following in [*strikes[1:], None]:
            self._until_ns = run.end.at_ns if following is None else following.at_ns
            back_ns = self._back_ns()
            if following is None or back_ns is not None or self._goes_on():
                self._find_gap(back_ns)
                return
            self.strikes.append(following)

    @property
    def _struck(self) -> dict[int, StrikeMade]:
        """The last strike of each rank."""
        return {rank: strike for strike in self.strikes for rank in strike.ranks}

    @property
    def ended(self) -> set[int]:
        """The ranks whose struck process has ended, but for one that had trained on after standing still."""
        of_pids = {pid: strike for strike in self.strikes for pid in strike.pids}
        ends = [(each, of_pids[each.pid]) for each in self._within(RankEnded) if each.pid in of_pids]
        return {end.rank for end, strike in ends if not (strike.for_ns and self._has_trained(end, strike))}

    def _has_trained(self, end: RankEnded, strike: StrikeMade) -> bool:
        since_ns, ranks = strike.at_ns + strike.for_ns, (end.rank, None)
        return any(since_ns < each.at_ns <= end.at_ns and each.rank in ranks for each in self._within(StepReport))

    def _goes_on(self) -> bool:
        """Returns whether training continues, be it without the struck ranks."""
        last_ns = self.strikes[-1].at_ns
        return len({each.step for each in self._within(StepReport) if each.at_ns > last_ns}) >= _TRAINS_ON

    def _within(self, kind: type[Any]) -> list[Any]:
        return [each for each in self.run.of(kind) if self._begin_ns < each.at_ns <= self._until_ns]

    def _back_ns(self) -> int | None:
        """Returns when the last struck rank has reported again; None if one has not, or the launcher was struck."""
        reports, begins, times = self._within(StepReport), self._within(RankBegan), []
        for rank, strike in self._struck.items():
            since_ns = strike.at_ns + strike.for_ns
            if rank in self.ended:
                since_ns = max((each.at_ns for each in begins if each.rank == rank), default=self._until_ns)
            own = (each.at_ns for each in reports if each.rank in (rank, None) and each.at_ns >= since_ns)
            times.append(next((at_ns for at_ns in own if at_ns > strike.at_ns), None))
        return max((at_ns for at_ns in times if at_ns is not None), default=None) if None not in times else None

    def _find_gap(self, back_ns: int | None) -> None:
        """Sets the begin and the end of the longest gap between reports up to the return of the struck ranks."""
        before = [each for each in self._reports if each.at_ns <= self._begin_ns]
        window = [each for each in self._within(StepReport) if back_ns is None or each.at_ns <= back_ns]
        last_ns = self.strikes[-1].at_ns
        trains = self._goes_on()
        window = window if back_ns is not None else window[: USUAL * (len({each.rank for each in before}) or 1)]
        times_ns = [*(each.at_ns for each in before[-1:]), *(each.at_ns for each in window)]
        gaps = [(later - earlier, earlier, later) for earlier, later in pairwise(times_ns) if later > last_ns]
        self.resume_ns: int | None = None
        self.since_ns = times_ns[-1] if times_ns else self._begin_ns
        if gaps and (back_ns is not None or trains):
            _, self.since_ns, self.resume_ns = max(gaps)
        elif window and not before:
            self.resume_ns = window[0].at_ns

    def recovery(self) -> ExternalRecovery:
        """Returns the recovery."""
        until_ns = self._until_ns if self.resume_ns is None else self.resume_ns
        before = [each for each in self._reports if each.at_ns < until_ns]
        # A launcher may tell of a failure when it is over, and once more at the end of all.
        earlier = {each.text for each in self.run.of(LauncherLine) if each.at_ns < self._begin_ns}
        words = [each for each in self._within(LauncherLine) if each.text not in earlier]
        lines = [each for each in words if each.at_ns <= until_ns]
        blamed = {each.blames for each in words if each.blames is not None}
        return ExternalRecovery(
            tuple(strike.fault for strike in self.strikes),
            tuple(sorted(self._struck)),
            tuple(sorted(self.ended)),
            self._begin_ns,
            max((each.step for each in before), default=-1),
            self._points_ns(until_ns, lines),
            self.resume_ns,
            self._stall(before, until_ns),
            self._lost(before),
            tuple(sorted(blamed)),
            {each.rank: each.why for each in self._within(RankStill) if each.at_ns <= until_ns},
        )

    def _points_ns(self, until_ns: int, lines: Sequence[LauncherLine]) -> dict[str, int]:
        begin_ns = self._begin_ns
        ends = [each.at_ns for each in self.run.of(RankEnded) if begin_ns < each.at_ns <= until_ns]
        begins = [each.at_ns for each in self.run.of(RankBegan) if begin_ns < each.at_ns <= until_ns]
        points = {"still": max(begin_ns, self.since_ns)} if self._reports else {}
        points |= {"notice": lines[0].at_ns} if lines else {}
        points |= {"end": max(ends)} if ends else {}
        points |= {"begin": max(begins)} if begins else {}
        return points | ({} if self.resume_ns is None else {"step": self.resume_ns})

    def _stall(self, before: Sequence[StepReport], until_ns: int) -> Stall | None:
        if not before:
            return None
        gap_ns = until_ns - self.since_ns
        usual = self._usual_ns(before)
        if usual is None:
            return Stall(0, gap_ns if self.resume_ns is not None else None)
        known_ns = max(0, gap_ns - usual)
        return Stall(known_ns, None if self.resume_ns is None else known_ns)

    def _usual_ns(self, before: Sequence[StepReport]) -> int | None:
        """Returns the median of the last usual steps before the gap; None if there were none."""
        begins: dict[tuple[str, int | None], dict[int, int]] = {}  # process -> step -> time
        for report in before:
            if report.at_ns <= self.since_ns:
                begins.setdefault((report.process, report.rank), {}).setdefault(report.step, report.at_ns)
        times = ([*at_ns.values()][_WARM_UP:][-USUAL:] for at_ns in begins.values())
        steps = [later - earlier for each in times for earlier, later in pairwise(each)]
        return int(median(steps)) if steps else None

    def _lost(self, before: Sequence[StepReport]) -> int:
        """Returns the steps that are done again; none if a process that survived goes on behind its newest one."""
        newest: dict[str, int] = {}  # process -> step
        for report in before:
            newest[report.process] = max(report.step, newest.get(report.process, -1))
        after = [each for each in self._reports if self.resume_ns is not None and each.at_ns >= self.resume_ns]
        firsts = {each.process: each.step for each in reversed(after)}
        if not after or any(step > newest.get(process, step) for process, step in firsts.items() if process):
            return 0
        again = min(each.step for each in after[: USUAL * (len(newest) or 1)])
        return max(0, max(newest.values(), default=-1) - again + 1)


# The checks of a run.


def external_checks(
    scenario: ExternalScenario, run: ExternalRun, with_twin: ExternalVerdict | None = None
) -> tuple[Check, ...]:
    """Returns the check of each expectation; those that a signal to bamboo left undecided are not judged."""
    expect, recoveries = scenario.expect, run.recoveries()
    checks = [_all_struck(scenario.faults, run), _outcome(scenario, run, recoveries)]
    if expect.steps_lost is not None:
        lost = max((each.lost_steps for each in recoveries), default=0)
        has_resumed = bool(recoveries) and all(each.resume_ns is not None for each in recoveries)
        text = f"{counted(lost, 'step')} lost, {expect.steps_lost} at most"
        check = judged("steps_lost", lost <= expect.steps_lost, text)
        checks.append(check if has_resumed else Check("steps_lost", "invalid", "training did not resume"))
    if expect.culprit is not None:
        checks.append(_culprit(recoveries))
    for name, part in (("trajectory", "weights"), ("samples", "samples")):
        if getattr(expect, name) is not None:
            checks.append(_like_twin(name, part, with_twin))
    if expect.leftovers is not None:
        left, unknown = run.leftovers, Check("leftovers", "invalid", "the command did not end by itself")
        checks.append(unknown if left is None else judged("leftovers", not left, ", ".join(left) or "none"))
    if expect.recovery is not None:
        checks += limit_checks(expect.recovery, recoveries)
    if run.end.why == "interrupt":
        return tuple(replace(check, result="not judged") for check in checks)
    return tuple(checks)


def _all_struck(faults: Sequence[ExternalFault], run: ExternalRun) -> Check:
    effects = {each.fault: each for each in run.of(EffectSeen)}
    struck = {each.fault for each in run.of(StrikeMade)}
    wrong = [
        f"{fault.id} ({fault.in_words()}): "
        + (
            effects[fault.id].how
            if fault.id in effects
            else "no effect was seen"
            if fault.id in struck
            else "its moment did not come"
        )
        for fault in faults
        if fault.id not in effects or effects[fault.id].why_not
    ]
    if wrong and not run.of(StepReport):
        wrong[0] += "; no rank has reported a step: call bamboo.progress(step) in it, or give `progress:` a pattern"
    words = "; ".join(
        f"{fault.id}: {_after_moment(fault, run)}{effects[fault.id].how}" for fault in faults if not wrong
    )
    return Check("faults", "invalid" if wrong else "passed", "; ".join(wrong) or words)


def _after_moment(fault: ExternalFault, run: ExternalRun) -> str:
    """Returns in words how late a fault at a step has struck; empty for another moment."""
    step, rank = fault.moment.step, fault.moment.rank
    strikes = [each.at_ns for each in run.of(StrikeMade) if each.fault == fault.id]
    if step is None or not strikes or fault.moment.delay_ns:
        return ""
    own = (each for each in run.of(StepReport) if rank is None or each.rank in (rank, None))
    moment_ns = next((each.at_ns for each in own if each.step >= step), strikes[0])
    return f"struck {max(0, strikes[0] - moment_ns) / 1e6:.1f} ms after step {step}, "


def _outcome(scenario: ExternalScenario, run: ExternalRun, recoveries: Sequence[ExternalRecovery]) -> Check:
    end, newest = run.end, max((each.step for each in run.of(StepReport)), default=-1)
    trained = "" if newest < 0 else f", the newest step is {newest}"
    has_stopped = bool(run.of(StepReport)) and any(each.resume_ns is None for each in recoveries)
    is_short = scenario.steps is not None and newest + 1 < scenario.steps
    if end.why == "interrupt":
        return Check("outcome", "invalid", f"the run was interrupted{trained}")
    if end.why == "timeout":
        outcome, text = "failed", "the command did not end in time"
    elif end.why == "gone" and not run.of(StepReport):
        return Check("outcome", "invalid", "the job has ended, and neither its exit code nor a step of it is known")
    elif end.why in ("attached", "gone"):
        text = "the job was left running" if end.why == "attached" else "the job has ended, its exit code is not known"
        outcome = "failed" if has_stopped else "recovered"
    elif end.code:
        outcome, text = "failed", f"the command ended with {end.code}"
    else:
        outcome, text = ("failed" if is_short else "recovered"), "the command ended with 0"
    if is_short and end.why == "exit":
        text += f", before the {counted(scenario.steps or 0, 'step')} of the job"
    return judged("outcome", outcome == scenario.expect.outcome, f"{outcome}: {text}{trained}")


def _like_twin(name: str, part: str, with_twin: ExternalVerdict | None) -> Check:
    judgement = next((each for each in with_twin.parts if each.part == part), None) if with_twin else None
    if judgement is None or judgement.status == "not compared":
        return Check(name, "invalid", judgement.text if judgement else "the twin did not run to its end")
    return judged(name, judgement.status != "different", judgement.text)


def _culprit(recoveries: Sequence[ExternalRecovery]) -> Check:
    """Checks that the launcher blames the ranks whose struck processes have ended, and no others."""
    if not any(each.blamed or each.ended for each in recoveries):
        return Check("culprit", "invalid", "no rank has ended, and the launcher has blamed none")
    wrong = [
        f"{' and '.join(one.faults)} ended {numbered('rank', one.ended, ' and ') if one.ended else 'no rank'}, "
        f"and the launcher blames {numbered('rank', one.blamed, ' and ') if one.blamed else 'none'}"
        for one in recoveries
        if one.ended != one.blamed
    ]
    blamed = sorted({rank for each in recoveries for rank in each.blamed})
    return judged("culprit", not wrong, "; ".join(wrong) or f"blamed: {numbered('rank', blamed, ' and ')}")


@dataclass(frozen=True, slots=True)
class ExternalResult:
    """The result of a scenario on a job of another launcher."""

    run: ExternalRun
    checks: tuple[Check, ...]
    recoveries: tuple[ExternalRecovery, ...] = field(default=())
    with_twin: ExternalVerdict | None = None

    @property
    def verdict_word(self) -> str:
        """The verdict, or ``interrupted``."""
        return "interrupted" if self.run.end.why == "interrupt" else verdict(self.checks)

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of `bamboo inject`."""
        if self.run.end.why == "interrupt":
            code = 128 + abs(self.run.end.code or 0)
            return ExitCode(code) if code in BY_SIGNAL else ExitCode.INTERRUPTED
        codes = {"passed": ExitCode.OK, "failed": ExitCode.EXPECTATION_FAILED}
        return codes.get(verdict(self.checks), ExitCode.INVALID_CASE)

    def as_dict(self) -> dict[str, Any]:
        """Returns the result as plain values."""
        return {
            "verdict": self.verdict_word,
            "exit_code": int(self.exit_code),
            "code": self.run.end.code,
            "checks": [{"name": each.name, "result": each.result, "text": each.text} for each in self.checks],
            "recoveries": [each.as_dict() for each in self.recoveries],
            "evidence": self.with_twin.as_dict() if self.with_twin else None,
        }
