"""Runs a case: a job with its faults and, if needed, its fault-free twin; then checks the expectations.

Rules: every command that runs a job runs it here. A run folder has all that is needed to run the case again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.checkpoints.ladder import Ladder
from engine.core.checks.expectations import Observed, why_no_twin
from engine.core.checks.twin import compare
from engine.core.config.job import Job
from engine.core.errors import BambooError, StorageError, UserError
from engine.core.history.process_records import EndedRecord
from engine.core.history.run_history import RunHistory
from engine.core.history.verdict_records import ComparingRecord, ComparisonRecord, NotComparedRecord
from engine.harness.cases.case import Case, facts_text, scenario_record, whole_text
from engine.harness.cases.case_result import CaseResult, judged
from engine.harness.run_end import in_new_folder, note_forced_end, record_failure, summary_of

if TYPE_CHECKING:
    from engine.core.checks.trajectory import TrajectoryRow
    from engine.files.run_folder import RunFolder
    from engine.harness.screen import Screen
    from engine.runtime.agent.run_view import Ending
    from engine.runtime.agent.taken_run import Seat
    from engine.runtime.keeping.scribe import Scribe
    from engine.runtime.process.fork_client import ForkServer
    from engine.runtime.store.etcd_settings import EtcdSettings


_PASSED_ON = ("faults", "grace_s", "injectable", "standby_coordinator", "notices")  # fields of a case for its session
_OF_THE_END = ("the last records", "trajectory.csv", "the result in run.json", "the seal")  # behind a given up disk
_QUICK_BYTES = 10_000_000  # of events: they are read in half a second; an interrupted command has no more time


def run_case(
    case: Case,
    etcd: EtcdSettings | None,
    screen: Screen,
    server: ForkServer | None = None,
    seat: Seat | None = None,
) -> CaseResult:
    """Runs a case in a new run folder; start a fork `server` after `mark_processes`, so that leftovers are found.

    With a folder in its `seat` this host goes on with what another one has begun, or begins it again.

    Raises BambooError if the run could not be started.
    """
    from engine.files.jobs import trust
    from engine.files.jobs.checkpoint_place import with_whole_place
    from engine.files.jobs.given_weights import hash_as_given
    from engine.models.model_registry import unreadable_files
    from engine.runtime.process.interrupts import holding

    started_s, job = time.monotonic(), case.scenario.job
    with _scribe_of(server, seat) as scribe:
        scribe.try_place(job, _is_in_process(server))
        if problems := unreadable_files(job, begins=case.origin is None):
            raise UserError(problems)
        init = case.origin.init if case.origin else hash_as_given(job.init, case.init)
        case = replace(case, init=init, scenario=replace(case.scenario, job=with_whole_place(job)))
        trust.note(case.scenario.job)
        known = seat.folder if seat else None
        if known is not None:
            with holding() as interrupts, interrupts.forcing(partial(note_forced_end, known, scribe)):
                return _run_in(known, scribe, case, etcd, screen, server, started_s, seat)
        with in_new_folder(scribe, job.results, case.name, screen.say) as folder:
            scribe.tell("sweep", job.results, named="")
            return _run_in(folder, scribe, case, etcd, screen, server, started_s, seat)


def _scribe_of(server: ForkServer | None, seat: Seat | None) -> AbstractContextManager[Scribe]:
    """Returns a scribe of this run; a host that takes over has one already, which outlives the run here."""
    from engine.runtime.keeping.scribe_work import scribe_for

    if seat is not None and seat.scribe is not None:
        return nullcontext(seat.scribe)
    return scribe_for(_is_in_process(server), {"sweep": _sweep})


def _sweep(desk: object, results: str) -> None:
    from engine.harness.dead_runs import delete_dead_stores

    delete_dead_stores(Path(results))


def _is_in_process(server: ForkServer | None) -> bool:
    return server is not None and server.pid == os.getpid()


def _run_in(
    folder: RunFolder,
    scribe: Scribe,
    case: Case,
    etcd: EtcdSettings | None,
    screen: Screen,
    server: ForkServer | None,
    started_s: float,
    seat: Seat | None,
) -> CaseResult:
    from engine.harness.state_lost import Restarts
    from engine.runtime.agent.taken_run import HandedOverError, Seat
    from engine.runtime.doctor.leak_check import LeakCheck
    from engine.runtime.keeping.keeper import place_of

    text = "" if case.file is None else whole_text(case.file)  # the user may change the file while the run goes on
    if text:
        scribe.write(folder.path / "scenario.yaml", text)
    home = seat.taken.home if seat and seat.taken else folder.path
    case = replace(case, begun_as=home.name)
    scribe.write(folder.run_json, facts_text(case, folder.path.name))
    traces = LeakCheck() if case.scenario.expect.leftovers else None
    drive = partial(_drive, screen=screen, etcd=etcd, server=server, seat=Seat(scribe=scribe))
    options: dict[str, Any] = {name: getattr(case, name) for name in _PASSED_ON}
    job = case.scenario.job
    place, run = place_of(job, str(home)), home.name
    restarts = Restarts(Ladder(job.restarts), place, run, screen.say, case.origin)
    options |= {"origin": case.origin, "revive": restarts.revive} | (
        {"seat": seat._replace(scribe=scribe)} if seat else {}
    )
    try:
        ending = drive(job, folder, run_id=case.run_id or folder.path.name, **options)
    except HandedOverError:
        scribe.add(folder.events, EndedRecord(outcome="left", exit_code=0))
        raise
    wall_s = time.monotonic() - started_s
    left = None if traces is None else traces.left(folder.logs, folder.path.name, etcd, server.pid if server else 0)
    try:
        alone = drive if server is None or not server.host else partial(drive, server=None)
        return _concluded(folder, scribe, case, text, ending, summary_of(folder, ending, wall_s), left, screen, alone)
    except StorageError as error:
        if ending.error is not None and str(error) not in str(ending.error):
            screen.say(f"bamboo: {error}")
        return _unstored(folder, scribe, case, ending, wall_s, error)


def _concluded(
    folder: RunFolder,
    scribe: Scribe,
    case: Case,
    text: str,
    ending: Ending,
    summary: Mapping[str, Any],
    left: list[str] | None,
    screen: Screen,
    drive: Callable[..., Ending],
) -> CaseResult:
    """Returns the result of a run that has ended, after its comparison and checks; stores all of it in its folder.

    `drive` runs the twin: of a run on several hosts on this one alone, because its bits are those of one host.

    Raises:
        StorageError: a file could not be written.
    """
    from engine.files.events_file import read_history
    from engine.files.trajectory_file import trajectory_text

    job, expect, faults = case.scenario.job, case.scenario.expect, case.faults
    if case.file is not None:
        scribe.add(folder.events, scenario_record(case.file, text))
    rows = ending.view.run_state.rows
    scribe.write(folder.trajectory, trajectory_text(rows))
    error = "" if ending.error is None else str(ending.error)
    scribe.await_file(folder.events)
    if ending.outcome == "interrupted" and folder.events.stat().st_size > _QUICK_BYTES and not faults:
        screen.say("a long run: its recoveries are in `bamboo report`")
        history = RunHistory(job)
    else:
        history = read_history(folder.events)
    seen = Observed(ending.exit_code, error, history, leftovers=left)
    other = "the run was resumed with other bits" if case.origin is not None and case.origin.other_bits else ""
    if why := why_no_twin(expect, faults, seen) or other:
        scribe.add(folder.events, NotComparedRecord(why=why))
    else:
        seen = replace(seen, twin=_compared(job, seen.history, rows, folder, scribe, screen, drive))
    result = judged(case.scenario, faults, folder.path, seen)
    result = replace(result, run_error=ending.error, summary=summary, is_scenario=case.file is not None)
    scribe.write(folder.run_json, facts_text(case, folder.path.name, result.to_plain()))
    scribe.add(folder.events, *result.records())
    scribe.seal(folder, result.ended)
    return result


def _unstored(
    folder: RunFolder, scribe: Scribe, case: Case, ending: Ending, wall_s: float, error: StorageError
) -> CaseResult:
    """Returns the result of a run whose files could not be written: its figures, no verdict on its weights."""
    ending = ending.unstored(error)
    if scribe.why:
        ending = replace(ending, missing=(*ending.missing, *_OF_THE_END))
    seen = Observed(ending.exit_code, str(ending.error), RunHistory(case.scenario.job))
    result = judged(case.scenario, case.faults, folder.path, seen)
    record_failure(folder, scribe, ending.error or error)
    summary = summary_of(folder, ending, wall_s)
    return replace(result, run_error=ending.error, summary=summary, is_scenario=case.file is not None)


def _drive(job: Job, folder: RunFolder, *, screen: Screen, **options: Any) -> Ending:
    """Runs a job and its loggers in a run folder, with the `options` of `run_session`."""
    from engine.files.host_facts import host_record
    from engine.observers.observers import observing
    from engine.runtime.agent.session import run_session

    with observing(job, folder.events, folder.logs, screen.say) as observers:
        with screen.picture(job, folder.events) as show:
            watch = observers.watching(show, lambda view: bool(view.run_state.losses))
            host = host_record(datetime.now())
            if (server := options["server"]) is not None and server.host:
                host = replace(host, node=server.host, run_id=options["run_id"])
            ending = run_session(job, folder.events, folder.logs, watch, host=host, **options)
        return replace(ending, loggers=observers.finish(ending.view.run_state.committed))


def _compared(
    job: Job,
    history: RunHistory,
    rows: list[TrajectoryRow],
    folder: RunFolder,
    scribe: Scribe,
    screen: Screen,
    drive: Callable[..., Ending],
) -> ComparisonRecord | BambooError:
    """Records and returns the comparison of a run of `job` with its twin, or the error of the twin.

    The job of `history` has no secret arguments.
    """
    from engine.harness.twin_run import twin_rows

    def run(twin: Job, own: RunFolder) -> Ending:
        screen.say("running the fault-free twin, to compare the weights with")
        return drive(twin, own, run_id=f"{folder.path.name}-twin", injectable=False)

    scribe.add(folder.events, ComparingRecord())
    try:
        found = compare(rows, twin_rows(job, folder, scribe, run, screen.say), history)
    except BambooError as error:
        scribe.add(folder.events, NotComparedRecord(why=str(error).splitlines()[0]))
        return error
    scribe.add(folder.events, found)
    return found
