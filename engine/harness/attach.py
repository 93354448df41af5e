"""Injects faults into a running job: writes a request for its launcher, then follows the events of the run.

Rules: the launcher decides whether a request fits; this module writes it, readable only by the user, and withdraws it
if the launcher does not accept it. Only events since the request are judged. A running job has no twin and no leftovers
yet: expectations about them are left out, and the user is informed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from engine.core.checks.expectations import Observation
from engine.core.checks.recoveries import RecoveryLog
from engine.core.errors import BambooError, ExitCode, NothingMatchedError, Problem, UserError
from engine.core.faults.expansion import describe, expand
from engine.core.faults.fault import After, At, Fault, to_plain
from engine.core.history.process_records import CheckRecord, HostRecord, RefusedRecord, RequestRecord, VerdictRecord
from engine.core.history.run_history import RunHistory, coordinating_host
from engine.core.history.run_records import CommitRecord
from engine.files.events_file import GrowingEvents, read_history
from engine.files.linked_lines import add_records
from engine.harness.case import CaseResult, judged
from engine.harness.dead_runs import launcher_runs
from engine.runtime.agent.injector import CLOSED
from engine.runtime.agent.requests import REQUEST, ask, withdraw
from engine.runtime.process.interrupts import RunInterruptedError, rest

if TYPE_CHECKING:
    from engine.files.jobs.scenario_file import LoadedScenario
    from engine.files.run_folder import RunFolder

_POLL_S = 0.1
_HEARD_WITHIN_S = 10.0
_BEGINS_WITHIN_S = 5.0
_COMMITS = 4  # from which a job's pace is measured
_STEPS_AFTER = 2  # steps to commit after the last confirmed fault, as proof that the run continues


def attach(loaded: LoadedScenario, folder: RunFolder, say: Callable[[str], None]) -> CaseResult:
    """Injects the faults of a scenario into a running job; returns when the run has recovered, or ended.

    Raises:
        NothingMatchedError: the run has ended, or does not begin.
        UserError: the faults do not fit its job.
    """
    events = _Events(folder)
    original = loaded.scenario.expect
    loaded = _fitted(loaded, events)
    expect = loaded.scenario.expect
    say(f"strikes the run {folder.path.name}, which has committed {events.history.committed + 1} steps")
    for line in describe(loaded.faults, loaded.scenario.job):
        say(line)
    names = [field.name for field in fields(expect)]
    if unjudged := [name for name in names if getattr(expect, name) != getattr(original, name)]:
        say(f"not judged: {', '.join(unjudged)} (the job keeps running)")
    since_ns = time.monotonic_ns()  # the events have the same clock
    request = _request(folder, loaded.faults)
    try:
        _wait(events, loaded.faults, request.name)
    except RunInterruptedError:
        strikes = "no fault strikes it" if withdraw(request) else "the faults still strike it"
        say(f"the job keeps running; {strikes}")
        raise
    except BambooError as error:
        if error.exit_code == ExitCode.INVALID_CASE:
            check = CheckRecord(name="faults", result="invalid", text=str(error), request=request.name)
            verdict = VerdictRecord(result="invalid", exit_code=int(error.exit_code), request=request.name)
            add_records(folder.events, check, verdict)
        raise
    finally:
        withdraw(request)  # an interrupted command must not leave faults behind
    history = read_history(folder.events)
    ended = history.training_ended
    observation = Observation(ended.exit_code if ended else 0, history.error, history, since_ns=since_ns)
    result = replace(judged(loaded.scenario, loaded.faults, folder.path, observation), is_scenario=True)
    add_records(folder.events, *result.records(request.name))
    return result


def as_of_now(loaded: LoadedScenario, folder: RunFolder) -> LoadedScenario:
    """Returns a scenario as `attach` would inject it now into a running job; injects nothing.

    Raises:
        NothingMatchedError: the run has ended.
        UserError: the faults do not fit its job.
    """
    return _fitted(loaded, _Events(folder))


def _fitted(loaded: LoadedScenario, events: _Events) -> LoadedScenario:
    """Returns a scenario whose steps count from the running job's next one, with fault ids that are new each time."""
    from engine.files.jobs.scenario_file import JobSource, fitted
    from engine.runtime.faults.registry import kinds

    if not events.history.is_injectable:
        raise UserError([Problem("--run", "a run that takes faults", events.folder.path.name, CLOSED)])
    if chief := coordinating_host(events.history):
        where = f"the run folder of host {chief}, which coordinates the run"
        raise UserError([Problem("--run", where, f"that of another host, {events.folder.path.name}")])
    job = events.history.job
    host = events.history.first(HostRecord)
    samples = None if host is not None and host.node else loaded.scenario.expect.samples  # other hosts have actions
    expect = replace(loaded.scenario.expect, trajectory=None, leftovers=None, samples=samples)
    meanwhile = events.steps_a_second()  # a quick job commits many steps before its launcher takes the request
    first_step = events.history.committed + 2 + meanwhile
    left = replace(job, steps=max(1, job.steps - first_step))
    scenario = fitted(loaded, kinds(), left, expect)
    mark = secrets.token_hex(2)
    faults = tuple(_moved(fault, mark, first_step) for fault in expand(scenario, loaded.seed))
    running = JobSource(events.folder.run_json)
    return replace(loaded, scenario=replace(scenario, job=job), faults=faults, source=running)


def _moved(fault: Fault, mark: str, first_step: int) -> Fault:
    moment = fault.moment
    if isinstance(moment, After):
        moment = replace(moment, fault=f"{moment.fault}.{mark}")
    else:
        moment = replace(moment, step=moment.step + first_step)
    return replace(fault, id=f"{fault.id}.{mark}", moment=moment)


def _request(folder: RunFolder, faults: tuple[Fault, ...]) -> Path:
    return ask(folder.path, REQUEST, [to_plain(fault) for fault in faults])


def _wait(events: _Events, faults: tuple[Fault, ...], request: str) -> None:
    """Waits until the run has recovered from the faults of a request, or has ended.

    Raises:
        UserError: the launcher refuses the request.
        BambooError: the launcher does not answer, or the faults came too late.
    """
    heard_s = time.monotonic() + _HEARD_WITHIN_S
    while not events.is_over():
        history = events.history
        refusal = next((record for record in history.of(RefusedRecord) if record.request == request), None)
        if refusal is not None:
            raise UserError([Problem("--run", "faults that the run can take", "", refusal.reason)])
        if not events.has_taken(request) and time.monotonic() > heard_s:
            text = f"{events.folder.path}: its launcher does not answer, and did not take the faults"
            raise BambooError(text, ExitCode.NOT_RECOVERED)
        moments = {fault.id: fault.moment for fault in faults}
        late = {name for name, at in moments.items() if isinstance(at, At) and at.step < history.committed}
        if missed := skipped(faults, late - history.struck):
            lines = [
                f"step {history.committed} is committed, and these did not strike; try again",
                *(f"{fault.id}: {fault.in_words(history.job.slot_noun)}" for fault in missed),
            ]
            raise BambooError("\n".join(lines), ExitCode.INVALID_CASE)
        if have_shown(faults, history) and not events.is_recovering:
            return
        rest(_POLL_S)


def skipped(faults: Sequence[Fault], late: Collection[str]) -> list[Fault]:
    """Returns the faults named in `late`, and the faults that wait for one of them, directly or indirectly."""
    out = {*late}
    for _ in faults:  # the longest possible chain
        out |= {fault.id for fault in faults if isinstance(fault.moment, After) and fault.moment.fault in out}
    return [fault for fault in faults if fault.id in out]


class _Events:
    """The events of a run, read as they are written."""

    def __init__(self, folder: RunFolder):
        self.folder = folder
        self._log = RecoveryLog()
        self._growing = GrowingEvents(folder.events)
        until_s = time.monotonic() + _BEGINS_WITHIN_S
        while not self._update():  # a launcher creates its folder before it writes there
            if time.monotonic() > until_s:
                about = f"{folder.path.name} has not begun within {_BEGINS_WITHIN_S:g} s"
                raise NothingMatchedError(f"{about}: see the output of its launcher, or name a live run")
            rest(_POLL_S)
        if self.is_over():
            raise NothingMatchedError(f"{folder.path.name} has ended: name a job that runs")

    def _update(self) -> bool:
        """Reads the new records; returns whether there is any record yet."""
        for record in self._growing.news():
            list(self._log.read(record))
        return not self.history.is_empty

    def is_over(self) -> bool:
        """Reads the new records; returns whether the run has ended or its launcher is gone."""
        self._update()
        return self.history.training_ended is not None or not launcher_runs(self.history, self.folder.path)

    def has_taken(self, request: str) -> bool:
        return any(record.request == request for record in self.history.of(RequestRecord))

    @property
    def history(self) -> RunHistory:
        return self._log.history

    @property
    def is_recovering(self) -> bool:
        """Whether no step has been committed since the last epoch."""
        return bool(self._log.epochs)

    def steps_a_second(self) -> int:
        """Returns the steps per second while a launcher reads a request, after a short wait for the first commits."""
        until_s = time.monotonic() + _HEARD_WITHIN_S
        while len(self._commits_ns()) < _COMMITS and time.monotonic() < until_s and not self.is_over():
            rest(_POLL_S)
        return pace(self._commits_ns())

    def _commits_ns(self) -> list[int]:
        return [commit.at_ns for commit in self.history.of(CommitRecord)]


def pace(times_ns: Sequence[int]) -> int:
    """Returns the number of steps per second, by the times of the last commits; 0 if there are too few."""
    lately_ns = times_ns[-_COMMITS:]
    return (len(lately_ns) - 1) * 10**9 // max(1, lately_ns[-1] - lately_ns[0]) if lately_ns else 0


def have_shown(faults: Sequence[Fault], history: RunHistory) -> bool:
    """Whether all faults are confirmed, or can no longer strike, and steps have been committed since.

    The victim of a fault in a recovery may die earlier. Such a fault can no longer strike after that recovery.
    """
    confirmed = history.confirmed_ns
    waiting = [fault for fault in faults if fault.id not in confirmed]
    if any(fault.id in history.struck or isinstance(fault.moment, At) for fault in waiting):
        return False
    delays_ns = sum(fault.moment.delay_ns for fault in waiting if isinstance(fault.moment, After))
    since_ns = max(confirmed[fault.id] for fault in faults if fault.id in confirmed) + delays_ns
    return sum(commit.at_ns > since_ns for commit in history.of(CommitRecord)) >= _STEPS_AFTER
