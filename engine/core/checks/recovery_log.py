"""Finds the recoveries of a run in its events, in the order of the file; `recovery_times` has the rules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from math import inf

from engine.core.action import COMPUTE_OPS, Action, parse_action
from engine.core.checks.phase_bounds import host_times, uncertain_phases
from engine.core.checks.recovery_times import Recovery
from engine.core.checks.stall import USUAL, Stall, StepLengths, with_later_steps
from engine.core.exclusion import Cause, Exclusion
from engine.core.history.process_records import ExitRecord, FailedRecord, RestartRecord, ResumedRecord
from engine.core.history.record import AGENT, Record
from engine.core.history.run_history import RunHistory
from engine.core.history.run_records import (
    ActionRecord,
    CommitRecord,
    EpochRecord,
    FaultRecord,
    GoRecord,
    MarkRecord,
    RaisedRecord,
    SuspicionRecord,
)
from engine.core.ownership import Slot
from engine.core.program.replay import replayed

FailureSign = FaultRecord | RaisedRecord | SuspicionRecord | ExitRecord


def recoveries(records: Iterable[Record]) -> list[Recovery]:
    """Returns the recoveries of a run, from its records in the order of the file; the last may be open."""
    log = RecoveryLog()
    found = [recovery for record in records for recovery in log.read(record)]
    found += [log.recovery(None)] if log.epochs else []
    commits_ns = [each.at_ns for each in log.history.of(CommitRecord)]
    return [_settled(each, following, commits_ns) for each, following in zip_longest(found, found[1:])]


def _settled(recovery: Recovery, following: Recovery | None, commits_ns: list[int]) -> Recovery:
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
            uncertain_phases(points, begin_ns, commit, self._tellers(), host_times(self.history)),
        )

    def _tellers(self) -> dict[int, int]:
        """Returns the worker that each time is of, where it is known."""
        return (
            {end_ns: worker for _, worker, _, end_ns in self._entries()}
            | {at_ns: worker for *_, at_ns, worker in self.marks}
            | {_at_ns(each): each.of for each in self.signs}
        )

    def _points_ns(self, begin_ns: int) -> dict[str, int]:
        """Returns the end of each phase before replay.

        Without an injected fault or an exception, the moment of an exit or of a broken link is not known, so detect is
        left out.
        """
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
        if out.cause is Cause.HANG:  # its heart goes on: it stands since its last action
            return out.alive_ns if done_ns is None else done_ns
        if out.alive_ns is None or done_ns is None:
            return out.alive_ns
        return max(out.alive_ns, done_ns)

    def _stall(self, points: Mapping[str, int], begin_ns: int, commit: CommitRecord | None) -> Stall:
        """Returns the time that training stood in the open recovery."""
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
        done = [action for worker, action, _ in entries if worker in out and self._owned(worker, action)]
        since = [(action, end_ns) for worker, action, end_ns in entries if worker not in out and end_ns > since_ns]
        again = frozenset(replayed((action for action, _ in since), done))
        return [end_ns for action, end_ns in since if action in again]

    def _owned(self, worker: int, action: Action) -> bool:
        return self.owners.get((action.pipeline, action.stage)) == worker

    def last_action(self, worker: int) -> tuple[int, str] | None:
        """Returns (step, action) of a worker's last finished action; None if the last few steps have none."""
        if worker in self.ends:
            return self.ends[worker]
        mine = [(end_ns, step, str(action)) for step, by, action, end_ns in self._entries() if by == worker]
        return max(mine)[1:] if mine else None


def _at_ns(sign: FailureSign) -> int:
    return sign.seen_ns if isinstance(sign, ExitRecord) else sign.at_ns
