"""The recoveries of a run, from its records: the dead, their heirs, the time of each phase, the stall of training."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, zip_longest
from math import inf
from statistics import median
from typing import Any

from engine.core.action import COMPUTE_OPS, Action, parse_action
from engine.core.exclusion import Cause, Exclusion, Verdict
from engine.core.history.merging import OffsetBounds
from engine.core.history.process_records import (
    ClockRecord,
    ExitRecord,
    FailedRecord,
    HostRecord,
    RestartRecord,
    ResumedRecord,
    StartedRecord,
)
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import (
    AGENT,
    ActionRecord,
    CommitRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    MarkRecord,
    RaisedRecord,
    Record,
    SuspicionRecord,
)
from engine.core.ownership import Slot
from engine.core.program.remaining_tasks import replayed
from engine.core.texts import counted, spans

# The time that training stalled because of a failure: the gap between the commits around it, less a usual step.
#
# Rules:
# - Times are nanoseconds. A usual step is the median of the last few steps under the same owners. The first step of a
#   run, which warms up, and the first step after a recovery, which restores shadows, are not usual.
# - If no slot has changed its owner, the steps after the recovery are usual as well: they count if none before does. So
#   a worker that leaves after its hand-over has a stall, although only one step lies between the two.
# - The time is a range, not a figure, if there is no usual step or if no commit has followed; the whole gap is the
#   most.
# - It is never less than the time without any finished action, because the rest of the gap holds one step. So it is
#   more than 0 even if the whole gap is shorter than a usual step, as on a busy machine.

USUAL = 10  # steps whose median is the usual length


@dataclass(frozen=True, slots=True)
class Stall:
    """The time that training stalled; the two are equal if it is known, and `most_ns` is None without a commit."""

    least_ns: int
    most_ns: int | None

    @property
    def bound(self) -> str:
        """``at least`` if only bounds are known, else an empty text."""
        return "" if self.most_ns == self.least_ns else "at least"

    def __str__(self) -> str:
        if not self.bound:
            return _text(self.least_ns)
        return f"at least {_text(self.least_ns)}" + ("" if self.most_ns is None else f", at most {_text(self.most_ns)}")


@dataclass(slots=True)
class StepLengths:
    """The begin of the open step, and the lengths of the last usual steps, from the commits of a run."""

    since_ns: int | None = None  # the last commit, or the begin of training
    usual: deque[int] = field(default_factory=lambda: deque(maxlen=USUAL))
    _is_usual: bool = False  # the open step

    def begin(self, at_ns: int) -> None:
        """Notes that training continues; the first time, training begins."""
        self.since_ns = at_ns if self.since_ns is None else self.since_ns

    def commit(self, at_ns: int, recovered: bool) -> None:
        """Notes a commit; `recovered` if it ended a recovery."""
        if recovered:
            self.usual.clear()
        elif self._is_usual and self.since_ns is not None:
            self.usual.append(at_ns - self.since_ns)
        self.since_ns, self._is_usual = at_ns, not recovered

    def lose_track(self) -> None:
        """Notes that commits before the next one are not known: no step ends with it."""
        self.since_ns, self._is_usual = None, False

    def stall(self, resume_ns: int | None, latest_ns: int, idle_ns: int) -> Stall:
        """Returns the stall in the open step, before its commit is noted.

        It ends at that commit, `resume_ns`, or else at `latest_ns`; no worker finished an action for `idle_ns` of it.
        """
        until_ns = latest_ns if resume_ns is None else resume_ns
        gap_ns = None if self.since_ns is None else until_ns - self.since_ns
        if gap_ns is None or not self.usual:
            return Stall(max(0, idle_ns), None if resume_ns is None else gap_ns)
        known_ns = max(0, idle_ns, gap_ns - int(median(self.usual)))
        return Stall(known_ns, None if resume_ns is None else known_ns)


def with_later_steps(stall: Stall, commits_ns: Sequence[int]) -> Stall:
    """Returns a stall of which only bounds are known, by the steps after it: from the commit that ended it on."""
    usual_ns = [later - earlier for earlier, later in pairwise(commits_ns[1 : USUAL + 2])]
    if stall.most_ns is None or not usual_ns:
        return stall
    known_ns = max(stall.least_ns, stall.most_ns - int(median(usual_ns)))
    return Stall(known_ns, known_ns)


def quantile(stalls: Sequence[Stall], part: float) -> Stall:
    """Returns a quantile of some stalls by nearest rank; its bounds are the quantiles of their bounds."""
    place = math.ceil(part * len(stalls)) - 1
    most_ns = sorted(math.inf if each.most_ns is None else each.most_ns for each in stalls)[place]
    return Stall(sorted(each.least_ns for each in stalls)[place], None if most_ns == math.inf else int(most_ns))


def _text(time_ns: int) -> str:
    if time_ns >= 1e9:
        return f"{time_ns / 1e9:.2f} s"
    return f"{time_ns / 1e6:.0f} ms" if time_ns >= 1e7 else f"{time_ns / 1e6:.1f} ms"


# One recovery of a run: the excluded workers, their heirs, and the time of each phase.
#
# Rules:
# - All times are nanoseconds on the host's monotonic clock.
# - A recovery begins with the injected fault, else with the last sign of life of a silent or hanging worker, else with
#   the first sign of the failure. It ends with the next commit. After the last commit no step is left to recover.
# - A further failure before that commit belongs to the same recovery. The phases are then those of its last epoch.
# - Phases overlap: regrouping, for instance, overlaps all phases until replay. Each phase counts only its time after
#   the end of the phase before, so the phases add up to the pause. Pause plus *merged* is the time to the first commit.
# - The clocks of several hosts are known within bounds. A phase shorter than its uncertainty (below) is not reported.
# - The cost of a recovery is its stall, which comes from the commits alone: `stall` has the rules.

PHASES = ("detect", "agree", "fence", "regroup", "inventory", "plan", "replay")


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery of a run.

    `verdict` names the excluded workers with the reasons; `last_actions` has the last finished (step, action) of each,
    or None. `heirs` are (slot, owner before, owner now); the `adopted` slots came from another pipeline. `points_ns`
    has the end of each phase, on all workers; a missing phase did not happen. Replay ends at the catch-up point: the
    survivors have redone each forward and backward that the excluded workers had finished for their slots in the open
    step. If there is none to redo, replay ends with the other phases.
    """

    epoch: int
    step: int  # the open step, which the survivors finish; the last step, when none is left
    reason: str
    verdict: Verdict
    last_actions: Mapping[int, tuple[int, str] | None]
    heirs: tuple[tuple[Slot, int, int], ...]
    faults: tuple[str, ...]
    begin_ns: int
    points_ns: Mapping[str, int]
    resume_ns: int | None = None  # the first commit afterwards
    lost_steps: int = 0  # committed before, and redone
    stall: Stall | None = None  # None if no step was left
    adopted: frozenset[Slot] = frozenset()
    after_end: bool = False  # no step was left
    planned: bool = False  # the last epoch was made at a step boundary, without a failure
    is_from_checkpoint: bool = False  # no worker held the state of a stage
    noun: str = "stage"  # for a slot of a pipeline
    uncertain_ns: Mapping[str, int] = field(default_factory=dict)  # phase -> how wrong its time can be

    @property
    def phases_ns(self) -> dict[str, int]:
        """The time that each phase took; a phase that did not happen is left out."""
        phases, reached_ns = {}, self.begin_ns
        for phase in sorted(self.points_ns, key=lambda phase: (self.points_ns[phase], PHASES.index(phase))):
            phases[phase] = max(0, self.points_ns[phase] - reached_ns)
            reached_ns = max(reached_ns, self.points_ns[phase])
        return {phase: phases[phase] for phase in PHASES if phase in phases}

    @property
    def reported_ns(self) -> dict[str, int]:
        """The reported phases: those, and *merged*, that are not shorter than their uncertainty."""
        phases = self.phases_ns | ({} if self.merged_ns is None else {"merged": self.merged_ns})
        return {phase: time_ns for phase, time_ns in phases.items() if time_ns >= self.uncertain_ns.get(phase, 0)}

    @property
    def noticed_ns(self) -> int:
        """The injected fault, else the first sign of the failure, which silence gives only with the verdict."""
        return self.begin_ns if self.faults else self.points_ns.get("detect", self.begin_ns)

    @property
    def pause_ns(self) -> int | None:
        """The time from the beginning to the catch-up point; None if it was not reached."""
        return sum(self.phases_ns.values()) if "replay" in self.points_ns else None

    @property
    def merged_ns(self) -> int | None:
        """The time from the catch-up point to the first commit; None without a commit."""
        return None if self.resume_ns is None or self.pause_ns is None else self.resume_ns - self.points_ns["replay"]

    @property
    def rung(self) -> str:
        """The source of the state of the slots that changed owners, such as ``shadow``."""
        if self.after_end:
            return "nothing was lost"
        if self.resume_ns is None:
            return "none"
        if self.is_from_checkpoint:
            return "checkpoint"
        out = {each.worker for each in self.verdict}
        sources = {
            "hand-over" if old not in out else "other pipeline" if slot in self.adopted else "shadow"
            for slot, old, _ in self.heirs
        }
        return ", ".join(sorted(sources)) or "nothing was lost"

    @property
    def sentences(self) -> list[str]:
        """A sentence about each evicted worker, to stand beside its last action; its last heartbeat if it has none."""
        last = self.last_actions
        return [f"worker {out.worker} {out.why if last[out.worker] is None else out.how}" for out in self.verdict]

    def __str__(self) -> str:
        planned = self.planned and all(each.cause is Cause.LEFT for each in self.verdict)
        parts = [f"worker {each.worker} {self._how(each)}" for each in self.verdict if not planned]
        takes = "was to take over" if self.resume_ns is None else "took over"
        parts = parts or [self.reason]
        if self.after_end:
            return "; ".join([*parts, "that was after the last commit, no step was left to recover"])
        parts += [f"worker {heir} {takes} {self._taken_by(heir)}" for heir in sorted({new for *_, new in self.heirs})]
        if self.resume_ns is None:
            return "; ".join([*parts, "not recovered"])
        parts += ["resumed from a checkpoint"] * self.is_from_checkpoint
        lost = f", {counted(self.lost_steps, 'step')} lost" if not planned else ""
        return "; ".join([*parts, f"training stalled for {self.stall}{lost}"])

    def _taken_by(self, heir: int) -> str:
        """Returns the slots that a worker took over, three or more consecutive ones as ``stages 4-7``."""
        by_pipeline: dict[int, list[int]] = {}
        for (pipeline, stage), _, new in self.heirs:
            by_pipeline.setdefault(pipeline, []).extend([stage] * (new == heir))
        return ", ".join(
            f"{self.noun}{'s' if '-' in span else ''} {span}" + (f" of pipeline {pipeline}" if pipeline else "")
            for pipeline, stages in by_pipeline.items()
            for span in spans(stages)
        )

    def _how(self, out: Exclusion) -> str:
        """Returns why a worker is out, after its last action; the last heartbeat, which lags, only without one."""
        at = self.last_actions[out.worker]
        return out.why if at is None else f"{out.how}{',' if ',' in out.how else ''} in step {at[0]} after {at[1]}"

    def as_dict(self) -> dict[str, Any]:
        """Returns the recovery as plain values, times in milliseconds."""
        uncertain = self.uncertain_ns
        return {
            "epoch": self.epoch,
            "step": self.step,
            "culprits": [each.worker for each in self.verdict],
            "verdict": self.sentences,
            "reason": self.reason,
            "last_actions": {worker: at and f"{at[1]} of step {at[0]}" for worker, at in self.last_actions.items()},
            "heirs": [{"slot": list(slot), "from": old, "heir": new} for slot, old, new in self.heirs],
            "faults": list(self.faults),
            "phases_ms": {phase: _ms(time_ns) for phase, time_ns in self.reported_ns.items() if phase != "merged"},
            "pause_ms": _ms(self.pause_ns),
            "merged_ms": _ms(self.reported_ns.get("merged")),
            **({"uncertain_ms": {phase: _ms(each) for phase, each in uncertain.items()}} if uncertain else {}),
            "stall_ms": _ms(self.stall.least_ns if self.stall else None),
            "stall_bound": self.stall.bound if self.stall else "",
            "stall_most_ms": _ms(self.stall.most_ns if self.stall else None),
            "rung": self.rung,
            "lost_steps": self.lost_steps,
        }


def _ms(time_ns: int | None) -> float | None:
    return None if time_ns is None else round(time_ns / 1e6, 3)


# The uncertainty of a phase whose two ends were recorded by different hosts.
#
# Rules: each host's times are known within the bounds of its clock. If two hosts recorded the ends of a phase, both
# uncertainties add up; if one host recorded both, there is none. A time that no worker recorded is the coordinator's,
# whose clock is the shared one. A run on one host has no record of clocks, and no uncertainty.

HostTime = Callable[[int, int], tuple[str, int]]  # worker, time -> its host, the uncertainty of the time


def host_times(history: RunHistory) -> HostTime | None:
    """Returns the host of a worker and the uncertainty of a time of it; None of a run on one host."""
    clocks: dict[str, list[ClockRecord]] = {}
    for each in history.of(ClockRecord):
        clocks.setdefault(each.of, []).append(each)
    if not clocks:
        return None
    nodes = {each.of: each.node for each in history.of(StartedRecord)}
    # Every other host has a record of its clock; the first record of a host may be of any of them.
    reference = next((each.node for each in history.of(HostRecord) if each.node not in clocks), "")

    def time_of(worker: int, at_ns: int) -> tuple[str, int]:
        node = nodes.get(worker, reference)
        bounds = (OffsetBounds(each.least_ns, each.most_ns).after(at_ns - each.at_ns) for each in clocks.get(node, ()))
        return node, min((each.within_ns for each in bounds), default=0)

    return time_of


def uncertain_phases(
    points_ns: Mapping[str, int],
    begin_ns: int,
    commit: CommitRecord | None,
    recorders: Mapping[int, int],
    times: HostTime | None,
) -> dict[str, int]:
    """Returns the uncertainty of phases that end on another host than they begin, and of *merged*.

    `points_ns` has the end of each phase, and `recorders` the worker that recorded it.
    """
    if times is None:
        return {}
    ends = sorted((at_ns, phase) for phase, at_ns in points_ns.items())
    uncertain_ns, reached_ns = {}, begin_ns
    if commit is not None and "replay" in points_ns:
        ends.append((commit.at_ns, "merged"))
    for at_ns, phase in ends:
        (before, one_ns), (after, two_ns) = (times(recorders.get(each, AGENT), each) for each in (reached_ns, at_ns))
        if before != after:
            uncertain_ns[phase] = one_ns + two_ns
        reached_ns = max(reached_ns, at_ns)
    return uncertain_ns


# Finds the recoveries of a run in its events, in the order of the file; the rules stand above.
FailureSign = FaultRecord | RaisedRecord | SuspicionRecord | ExitRecord


def recoveries(records: Iterable[Record]) -> list[Recovery]:
    """Returns the recoveries of a run, from its records in the order of the file; the last may be open."""
    log = RecoveryLog()
    closed = [recovery for record in records for recovery in log.read(record)]
    closed += [log.recovery(None)] if log.epochs else []
    commits_ns = [commit.at_ns for commit in log.history.of(CommitRecord)]
    return [_with_stall(each, following, commits_ns) for each, following in zip_longest(closed, closed[1:])]


def _with_stall(recovery: Recovery, following: Recovery | None, commits_ns: list[int]) -> Recovery:
    """Returns a recovery whose stall is known if the steps up to the following recovery make it known."""
    stall, resume_ns = recovery.stall, recovery.resume_ns
    if stall is None or not stall.bound or resume_ns is None or recovery.heirs:
        return recovery
    until_ns = inf if following is None else following.resume_ns or following.begin_ns
    later_ns = [at_ns for at_ns in commits_ns if resume_ns <= at_ns < until_ns]
    return replace(recovery, stall=with_later_steps(stall, later_ns))


@dataclass(slots=True)
class RecoveryLog:
    """Finds recoveries record by record; to begin in the middle of a run, give a `history` with job and owners."""

    history: RunHistory = field(default_factory=RunHistory)
    owners: dict[Slot, int] = field(default_factory=dict)  # before the recovery
    lengths: StepLengths = field(default_factory=StepLengths)
    committed: int = -1  # the last step before the open one
    actions: dict[int, list[tuple[int, Action, int]]] = field(default_factory=dict)  # step -> worker, action, end
    epochs: list[EpochRecord] = field(default_factory=list)  # since the last commit
    signs: list[FailureSign] = field(default_factory=list)  # since the last commit
    marks: list[tuple[int, str, int, int]] = field(default_factory=list)  # (epoch, phase, time, worker)
    adopted: set[Slot] = field(default_factory=set)
    out_since: dict[int, int] = field(default_factory=dict)  # worker -> verdict; its later actions are ignored
    is_over: bool = False  # no step is left
    is_resumed: bool = False  # the open recovery goes on from a checkpoint, with so many steps lost:
    lost: int = 0
    ends: dict[int, tuple[int, str] | None] = field(default_factory=dict)  # last actions of workers lost before it

    def read(self, record: Record) -> Iterator[Recovery]:
        """Reads one record; yields the recovery that the record ends."""
        owners = self.history.owners
        self.history.add(record)
        match record:
            case ActionRecord() if record.end_ns <= self.out_since.get(record.worker, record.end_ns):
                entry = (record.worker, parse_action(record.action), record.end_ns)
                self.actions.setdefault(record.step, []).append(entry)
            case FaultRecord() | RaisedRecord() | SuspicionRecord():
                self.signs.append(record)
            case ExitRecord() if not record.expected:
                self.signs.append(record)
            case EpochRecord() if self.history.is_training:
                self.owners = self.owners if self.epochs else owners
                self.epochs.append(record)
                for out in record.verdict:
                    self.out_since.setdefault(out.worker, record.at_ns)
            case RestartRecord():  # no step is committed: all begins again
                self.signs, self.epochs, self.marks, self.actions, self.adopted = [], [], [], {}, set()
                self.out_since = {}
            case ResumedRecord():
                self.is_resumed, self.lost = bool(self.epochs), record.lost
                self.ends = {worker: self.last_action(worker) for worker in self.out_since}
                self.out_since = {}  # other processes have these numbers now
            case MarkRecord():
                self.marks.append((record.epoch, record.phase, record.at_ns, record.worker))
                self.adopted |= {*(record.adopted or ())}
            case GoRecord():
                self.is_over = self.is_over or record.end  # the run was interrupted during a recovery
                self.lengths.begin(record.at_ns)
                self.marks.append((record.epoch, "plan", record.at_ns, AGENT))
            case CommitRecord():
                if self.epochs:
                    yield self.recovery(record)
                self._close(record)

    def _close(self, commit: CommitRecord) -> None:
        if commit.step > self.committed + 1 and self.committed >= 0:  # commits between are not known
            self.lengths.lose_track()
        self.lengths.commit(commit.at_ns, recovered=bool(self.epochs))
        self.committed = commit.step
        self.is_over = self.is_over or commit.last
        self.epochs, self.adopted, self.is_resumed, self.lost, self.ends = [], set(), False, 0, {}
        # Workers write on their own: records of the time after a commit may stand before the commit's record.
        self.signs = [sign for sign in self.signs if sign.at_ns > commit.at_ns]
        self.marks = [mark for mark in self.marks if mark[2] > commit.at_ns]
        # A fast worker may have begun the next step before this record was written.
        self.actions = {step: entries for step, entries in self.actions.items() if step > commit.step - USUAL}

    def recovery(self, commit: CommitRecord | None) -> Recovery:
        """Returns the open recovery; `commit` ends it if given."""
        last = self.epochs[-1]
        after_end = commit is None and self.is_over
        step = self.committed + (not after_end) if commit is None else commit.step
        verdict = tuple(each for epoch in self.epochs for each in epoch.verdict)
        out = {each.worker for each in verdict}
        now = self.history.owners
        moved = (
            (slot, old, now[slot]) for slot, old in sorted(self.owners.items()) if not after_end and now[slot] != old
        )
        begin_ns = self._begin_ns()
        points = self._points_ns(begin_ns)
        if commit is not None and "plan" in points:
            points["replay"] = max([*points.values(), *self._redone(step, out, last.at_ns)])
        return Recovery(
            last.epoch,
            step,
            last.reason,
            verdict,
            {worker: self.last_action(worker) for worker in sorted(out)},
            tuple(moved),
            tuple(each.fault for each in self.signs if isinstance(each, FaultRecord)),
            begin_ns,
            points,
            None if commit is None else commit.at_ns,
            max(self.lost, self.committed + 1 - step, 0),
            None if after_end else self._stall(points, begin_ns, commit),
            frozenset(self.adopted),
            after_end,
            last.planned,
            commit is not None and (self.is_resumed or step <= self.committed),
            self.history.job.slot_noun,
            uncertain_phases(points, begin_ns, commit, self._recorders(), host_times(self.history)),
        )

    def _recorders(self) -> dict[int, int]:
        return (
            {end_ns: worker for _, worker, _, end_ns in self._entries()}
            | {at_ns: worker for *_, at_ns, worker in self.marks}
            | {_at_ns(each): each.of for each in self.signs}
        )

    def _points_ns(self, begin_ns: int) -> dict[str, int]:
        """Returns the end of each phase before replay; no detect if the moment of the failure is not known."""
        last = self.epochs[-1]
        seen_ns = [_at_ns(each) for each in self.signs if not isinstance(each, (FaultRecord, RaisedRecord))]
        detect_ns = min([*seen_ns, self.epochs[0].at_ns])
        points = {"agree": last.at_ns} | ({"detect": detect_ns} if begin_ns < detect_ns else {})
        for phase in ("fence", "regroup", "inventory", "plan"):
            # A worker's mark may stand before the agent's record of the same epoch.
            at_ns = [at for epoch, name, at, _ in self.marks if (epoch, name) == (last.epoch, phase)]
            if at_ns:
                points[phase] = max(at_ns)
        return points

    def _begin_ns(self) -> int:
        """Returns the time of the fault, the exception, the last sign of life, or the first sign of failure."""
        first = self.epochs[0]
        struck = {each.of for each in self.signs if isinstance(each, FaultRecord)}
        unseen = [self._alive_ns(each) for each in first.verdict if each.worker not in struck]
        if not (self.signs or first.verdict or first.planned):  # every worker waited for a word that was lost
            unseen = [max((entry[-1] for entry in self._entries()), default=None)]
        return min([first.at_ns, *map(_at_ns, self.signs), *(at_ns for at_ns in unseen if at_ns is not None)])

    def _alive_ns(self, out: Exclusion) -> int | None:
        """Returns the last sign of life of a worker whose failure gave no sign; None for any other failure."""
        done_ns = max((end_ns for _, worker, _, end_ns in self._entries() if worker == out.worker), default=None)
        if out.cause is Cause.HANG:  # its heartbeats go on: it hangs since its last action
            return out.alive_ns if done_ns is None else done_ns
        if out.alive_ns is None or done_ns is None:
            return out.alive_ns
        return max(out.alive_ns, done_ns)

    def _stall(self, points: Mapping[str, int], begin_ns: int, commit: CommitRecord | None) -> Stall:
        quiet_until_ns = points.get("plan", max(points.values()))
        done_ns = [end_ns for *_, end_ns in self._entries() if end_ns <= quiet_until_ns]
        failed = self.history.first(FailedRecord)
        latest_ns = max(quiet_until_ns, failed.at_ns if failed else 0)
        # Without records of actions, survivors may have gone on until they were fenced.
        last_ns = max(done_ns, default=points.get("fence", begin_ns))
        idle_ns = quiet_until_ns - max(last_ns, self.lengths.since_ns or 0)
        resume_ns = None if commit is None else commit.at_ns
        return self.lengths.stall(resume_ns, latest_ns, idle_ns)

    def _entries(self) -> Iterator[tuple[int, int, Action, int]]:
        """Yields (step, worker, action, end) of the last few steps."""
        return ((step, *entry) for step, entries in self.actions.items() for entry in entries)

    def _redone(self, step: int, out: set[int], since_ns: int) -> list[int]:
        """Returns the times at which survivors redid the actions that excluded workers had finished for their slots."""
        entries = [entry for entry in self.actions.get(step, []) if entry[1].op in COMPUTE_OPS]
        done = [
            action for by, action, _ in entries if by in out and by == self.owners.get((action.pipeline, action.stage))
        ]
        since = [(action, end_ns) for worker, action, end_ns in entries if worker not in out and end_ns > since_ns]
        again = frozenset(replayed((action for action, _ in since), done))
        return [end_ns for action, end_ns in since if action in again]

    def last_action(self, worker: int) -> tuple[int, str] | None:
        """Returns (step, action) of a worker's last finished action; None if the last few steps have none."""
        if worker in self.ends:
            return self.ends[worker]
        mine = [(end_ns, step, str(action)) for step, by, action, end_ns in self._entries() if by == worker]
        return max(mine)[1:] if mine else None


def _at_ns(sign: FailureSign) -> int:
    return sign.seen_ns if isinstance(sign, ExitRecord) else sign.at_ns
