"""Asks the launcher of a running job for one more worker, or for another schedule, and follows the events of the run.

Rules: a request is readable only by the user, and is withdrawn if the launcher has not taken it when the command ends.
The launcher decides: it starts the worker with the code it has loaded, on the host with the fewest workers; a command
with other code or other arithmetic is refused first. It checks that a schedule fits the job.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from engine.core.errors import (
    BambooError,
    EnvironmentLacksError,
    ExitCode,
    NothingMatchedError,
    Problem,
    UserError,
    nearest,
    required,
)
from engine.core.history.process_records import ExitRecord, RefusedRecord, TrainingEndedRecord, WaitingRecord
from engine.core.history.run_history import RunHistory, coordinating_host
from engine.core.history.run_records import (
    AddedRecord,
    CommitRecord,
    CrampedRecord,
    EpochRecord,
    HeirsRecord,
    JobRecord,
    PolicyRecord,
    Record,
)
from engine.core.job.bit_fields import compared_facts, different_facts
from engine.core.job.job import Job
from engine.core.protocol.run_status import idle_members
from engine.core.protocol.schedule_change import OWN
from engine.core.texts import places_text
from engine.files.events_file import GrowingEvents
from engine.files.host_facts import host_facts
from engine.files.run_folder import LATEST, RunFolder, find_run
from engine.files.trajectory_file import own_sources
from engine.harness.dead_runs import launcher_runs, live_runs
from engine.runtime.agent.requests import BEGINNING, CLOSED, TOO_LATE, ask, takes_workers, withdraw
from engine.runtime.agent.schedule_requests import BEGINNING as SCHEDULE
from engine.runtime.process.interrupts import RunInterruptedError, present, rest

_POLL_S = 0.1
_HEARD_WITHIN_S = 10.0
_MOST_TO_LEAVE_S = 86_400.0  # the run ends a worker after its grace; a second signal ends the command
_ENDS_WITHIN_S = 5.0  # if the run ends this soon after its worker was killed, the worker did not die alone

News = dict[str, Any]  # what has happened to the worker, as JSON; `text` says it in words


def run_to_join(results: Path, run: str) -> RunFolder:
    """Returns a live run that accepts workers from this host.

    Raises:
        NothingMatchedError: there is no such run, or it has ended.
        UserError: no worker can join it.
        EnvironmentLacksError: this command has other code or other arithmetic.
    """
    folder, history = _live_run(results, run, "nothing can join it")
    if not takes_workers(history.job):
        hint = "start it with --elastic or --standby N"
        raise UserError([Problem("--join", "a run that takes workers", folder.path.name, f"{CLOSED}; {hint}")])
    if chief := coordinating_host(history):
        hint = f"a worker is started where the fewest are, by the host that coordinates: join there, on {chief}"
        raise UserError([Problem("--join", "the run on the host that coordinates it", folder.path.name, hint)])
    _refuse_other_bits(folder, history.job)
    return folder


def _live_run(results: Path, run: str, then: str) -> tuple[RunFolder, RunHistory]:
    """Returns a live run, and its history so far.

    Raises:
        NothingMatchedError: there is no such run, or it has not begun, or it has ended, and so `then`.
    """
    try:
        folder = find_run(results, run)
    except NothingMatchedError:
        raise NothingMatchedError(f"no run {run!r} in {str(results)!r}", _others(run, results)) from None
    history = GrowingEvents(folder.events).read_on()
    if history.training_ended is not None or not launcher_runs(history, folder.path):
        if not history.of(JobRecord) and folder.path.name in live_runs(folder.path.parent):
            raise NothingMatchedError(f"{folder.path.name} has not begun yet", "try it again")
        if not folder.events.exists():
            raise NothingMatchedError(f"{run!r} is not a run folder", _others(run, results))
        others = _others(run, folder.path.parent, (folder.path.name, LATEST))
        raise NothingMatchedError(f"{folder.path.name} has ended, and {then}", others)
    return folder, history


def _others(run: str, results: Path, without: tuple[str, ...] = ()) -> str:
    """Returns in words the live run with the nearest name, or all live runs."""
    live = [name for name in live_runs(results) if name not in without]
    names = [*live, *({LATEST} - {run, *without})]
    return nearest(run, names) or (f"running now: {', '.join(live)}" if live else "no run is live there")


def _refuse_other_bits(folder: RunFolder, job: Job) -> None:
    """Raises EnvironmentLacksError with each fact of this host and of the code that differs from those of a run."""
    there = json.loads(folder.run_json.read_text(encoding="utf-8"))
    before = {**compared_facts(there.get("host", {}), job), "sources": there.get("sources")}
    now = {**compared_facts(host_facts(Path.cwd()), job), "sources": own_sources()}
    if wrong := different_facts(before, now):
        run = folder.path.name
        lines = [f"{fact.name}: expected {fact.before!r} as in run {run}, found {fact.now!r}" for fact in wrong]
        raise EnvironmentLacksError("\n".join([*lines, "a worker with other code or arithmetic gives other bits"]))


class _LiveRun:
    """A running job, whose records are read as its launcher writes them."""

    def __init__(self, folder: RunFolder):
        self.folder, self.history = folder, RunHistory()
        self._growing = GrowingEvents(folder.events)

    def news(self) -> Iterator[Record]:
        for record in self._growing.news():
            self.history.add(record)
            yield record

    def is_over(self) -> bool:
        return self.history.training_ended is not None or not launcher_runs(self.history, self.folder.path)


class AddedWorker:
    """One worker that is added to a run."""

    def __init__(self, folder: RunFolder, *, is_standby: bool):
        self.folder = folder
        self.worker: int | None = None
        self._is_standby = is_standby
        self._run = _LiveRun(folder)
        self._members: tuple[int, ...] = ()
        self._owned: tuple[int, ...] = ()
        self._idle = ""  # why it owns nothing, as last said
        self._code: int | None = None

    def follow(self) -> Iterator[News]:
        """Requests the worker, and yields news about it until it or the run has ended.

        A first interrupt gives the worker its notice, and then this still follows it to its end.

        Raises:
            NothingMatchedError: the run has ended, or its last step has begun.
            UserError: the launcher refuses the worker.
            BambooError: the launcher does not answer, or was killed; the worker has died.
            RunInterruptedError: at an interrupt before the launcher has answered.
        """
        list(self._news())  # the state before
        path = ask(self.folder.path, BEGINNING, {"ask": "join", "standby": self._is_standby})
        try:
            yield from self._answered(path.name)
        except BaseException:
            self._withdraw(path)
            raise
        if (signals := present()) is not None:
            signals.limit_s = _MOST_TO_LEAVE_S
        try:
            yield from self._lived(is_breakable=True)
        except RunInterruptedError:
            ask(self.folder.path, BEGINNING, {"ask": "leave", "worker": self.worker})
            yield {"event": "leaves", "worker": self.worker, "text": f"worker {self.worker} gets its notice"}
            yield from self._lived(is_breakable=False)

    @property
    def exit_code(self) -> int:
        """The exit code of the run, or 0 if the worker has left before."""
        ended = self._run.history.training_ended
        return 0 if ended is None else ended.exit_code

    def _withdraw(self, request: Path) -> None:
        """Withdraws a request, or asks a worker that was started meanwhile to leave."""
        if not withdraw(request):
            list(self._news(request.name))
            if self.worker is not None:
                ask(self.folder.path, BEGINNING, {"ask": "leave", "worker": self.worker})

    def _answered(self, request: str) -> Iterator[News]:
        until_s = time.monotonic() + _HEARD_WITHIN_S
        while self.worker is None:
            yield from self._news(request)
            if self._run.is_over():
                raise NothingMatchedError(f"{self.folder.path.name} has ended: name a live run")
            if self.worker is None and time.monotonic() > until_s:
                text = f"{self.folder.path}: its launcher does not answer, and did not start a worker"
                raise BambooError(text, ExitCode.NOT_RECOVERED)
            if self.worker is None:
                _pause(is_breakable=True)

    def _lived(self, *, is_breakable: bool) -> Iterator[News]:
        """Yields news about the worker until it or the run has ended."""
        until_s = float("inf")
        while True:
            yield from self._news()
            if self._run.is_over():
                yield from self._news()
                if self._run.history.training_ended is None:
                    text = f"{self.folder.path.name}: its launcher was killed, and all its workers with it"
                    raise BambooError(text, ExitCode.NOT_RECOVERED)
                return
            if self._code is not None and self._code != ExitCode.OK:
                if self._code == ExitCode.LEFT_WITH_NOTICE:
                    return
                until_s = min(until_s, time.monotonic() + _ENDS_WITHIN_S)
            if time.monotonic() > until_s:
                text = f"worker {self.worker} exited with code {self._code}, and the run continues without it"
                raise BambooError(text, ExitCode.NOT_RECOVERED)
            _pause(is_breakable=is_breakable)

    def _news(self, request: str = "") -> Iterator[News]:
        for record in self._run.news():
            if request and isinstance(record, RefusedRecord) and record.request == request:
                if record.reason == TOO_LATE:
                    name = self.folder.path.name
                    raise NothingMatchedError(f"{name}: {record.reason}, and nothing can join it")
                expected = "a worker that the run can take"
                raise UserError([Problem("--join", expected, self.folder.path.name, record.reason)])
            if request and isinstance(record, AddedRecord) and record.request == request:
                self.worker = record.of
                yield self._said("started", f"worker {record.of} starts")
            elif self.worker is not None:
                yield from self._of_worker(record)
                yield from self._of_idle_worker(record)

    def _of_worker(self, record: Record) -> Iterator[News]:
        worker = required(self.worker, "the launcher has answered")
        match record:
            case WaitingRecord(of=of, lost="") if of == worker:
                yield self._said("waits", f"worker {worker} has loaded code and data, and is waiting{self._limit()}")
            case WaitingRecord(of=of, lost=lost) if of == worker:
                yield self._said("lost", f"worker {worker} {lost}")
            case CrampedRecord(of=of, why=why) if of == worker:
                text = f"worker {worker} {why or 'has memory enough now, and may join'}"
                yield self._said("cramped", text, waits=bool(why))
            case EpochRecord(members=members, owners=owners):
                yield from self._of_epoch(members, owners)
            case HeirsRecord(owners=owners):
                yield from self._of_epoch(self._members, owners)
            case ExitRecord(of=of, code=code) if of == worker:
                self._code = code
                yield self._said("ended", f"worker {worker} exited with code {code}", code=code)
            case TrainingEndedRecord(outcome=outcome):
                end = {"outcome": outcome, "exit_code": record.exit_code}
                yield self._said("run ended", f"the run has ended: {outcome}", **end)

    def _of_epoch(self, members: tuple[int, ...], owners: tuple[int, ...]) -> Iterator[News]:
        history = self._run.history
        after = f"after step {history.committed}" if history.of(CommitRecord) else "before the first commit"
        if self.worker in members and self.worker not in self._members:
            yield self._said("member", f"worker {self.worker} is a member, {after}")
        self._members = members
        job = history.job
        owned = tuple(place for place, owner in enumerate(owners) if owner == self.worker)
        if owned != self._owned:
            self._owned = owned
            slots = places_text(job.slot_noun, owned, job.slots, len(owners)) or "nothing"
            yield self._said("owns", f"worker {self.worker} owns {slots}, {after}", slots=list(owned))

    def _of_idle_worker(self, record: Record) -> Iterator[News]:
        if isinstance(record, EpochRecord | HeirsRecord | PolicyRecord):
            why = idle_members(self._run.history).get(required(self.worker, "the launcher has answered"), "")
            if why and why != self._idle:
                yield self._said("idle", f"worker {self.worker} {why}")
            self._idle = why

    def _limit(self) -> str:
        """Returns words about the most workers of the run if it has them, so that the worker waits for a free place."""
        most, epochs = self._run.history.job.max_workers, self._run.history.epochs
        is_full = 0 < most <= len(epochs[-1].members if epochs else ())
        return f", because the run has {most} workers (--max-workers)" if is_full else ""

    def _said(self, event: str, text: str, **more: object) -> News:
        return {"event": event, "worker": self.worker, "step": self._run.history.committed, **more, "text": text}


def _pause(*, is_breakable: bool) -> None:
    (rest if is_breakable else time.sleep)(_POLL_S)


def use_schedule(results: Path, run: str, name: str) -> tuple[RunFolder, EpochRecord, int]:
    """Lets a run use a schedule; returns its folder, the epoch that has the schedule, and the first step of it.

    Raises:
        NothingMatchedError: there is no such run, or it has ended, or no step boundary is left.
        UserError: the schedule does not fit the job, or is in use; or another host coordinates the run.
        BambooError: the launcher does not answer.
    """
    folder, history = _live_run(results, run, "no step is left for another schedule")
    if chief := coordinating_host(history):
        hint = f"use the run folder of host {chief}"
        raise UserError([Problem("--run", "the run on the host that coordinates it", folder.path.name, hint)])
    live = _LiveRun(folder)
    epoch = max((each.epoch for each in live.news() if isinstance(each, EpochRecord)), default=0)
    request = ask(folder.path, SCHEDULE, {"schedule": name})
    wanted, until_s = "" if name in (OWN, live.history.job.schedule) else name, time.monotonic() + _HEARD_WITHIN_S
    try:
        while True:
            for record in live.news():
                if isinstance(record, RefusedRecord) and record.request == request.name:
                    raise _refusal(folder, name, record.reason)
                if isinstance(record, EpochRecord) and record.epoch > epoch and record.schedule == wanted:
                    return folder, record, live.history.committed + 1
            if live.is_over():
                raise NothingMatchedError(f"{folder.path.name} has ended before it could use schedule {name}")
            if request.exists() and time.monotonic() > until_s:
                raise BambooError(f"{folder.path}: its launcher does not answer", ExitCode.NOT_RECOVERED)
            rest(_POLL_S)
    finally:
        withdraw(request)


def _refusal(folder: RunFolder, name: str, reason: str) -> BambooError:
    if reason == TOO_LATE:
        return NothingMatchedError(f"{folder.path.name}: {reason}, and no step is left for schedule {name}")
    return UserError([Problem("NAME", "a schedule that the run can use", repr(name), reason)])
