"""Runs a case: a job with its faults and, if needed, its fault-free twin; then checks the expectations.

Rules: every command that runs a job runs it here. A run folder has all that is needed to run the case again.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.core.checkpoint_rules import Ladder
from engine.core.checks.expectations import Observation, why_no_twin
from engine.core.checks.proof import compare, fingerprint
from engine.core.errors import BambooError, StorageError, UserError, required
from engine.core.history.process_records import (
    ComparingRecord,
    ComparisonRecord,
    EndedRecord,
    NotComparedRecord,
    TwinRecord,
)
from engine.core.history.run_history import RunHistory
from engine.core.job.bit_fields import twin_of
from engine.core.job.job import Job
from engine.harness.case import Case, CaseResult, facts_text, judged, scenario_record, whole_text

if TYPE_CHECKING:
    from engine.core.checks.trajectory import TrajectoryRow
    from engine.files.run_folder import RunFolder
    from engine.harness.screen import Screen
    from engine.runtime.agent.run_state import Ending, FailoverContext
    from engine.runtime.agent.scribe import Scribe
    from engine.runtime.process.spawner import Spawner
    from engine.runtime.store.etcd_settings import EtcdSettings


@contextlib.contextmanager
def in_new_folder(scribe: Scribe, results: str, name: str, say: Callable[[str], None]) -> Iterator[RunFolder]:
    """Creates a run folder, which the `scribe` owns, and records there whatever ends the command during the block."""
    from engine.runtime.process.interrupts import holding

    folder = scribe.make_run_folder(results, name, say)
    with (
        holding() as interrupts,
        failure_recorded(folder, scribe),
        interrupts.forcing(partial(note_forced_end, folder, scribe)),
    ):
        yield folder


@contextlib.contextmanager
def failure_recorded(folder: RunFolder, scribe: Scribe) -> Iterator[None]:
    """Records an error that ends the command before the verdict; deletes the folder of a run without a record."""
    from engine.files.atomic_write import of_system

    try:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            raise of_system(error) from error
    except BambooError as error:
        record_failure(folder, scribe, error)
        raise


def record_failure(folder: RunFolder, scribe: Scribe, error: BambooError) -> None:
    """Records that this error ended the command, if the disk works; deletes a folder without any record."""
    with contextlib.suppress(StorageError):
        scribe.ask("fail", str(folder.path), str(error), int(error.exit_code))


def note_forced_end(folder: RunFolder, scribe: Scribe, number: int) -> None:
    """Records that a second signal ended the command at once."""
    from engine.runtime.agent.run_state import reporting_unwritten

    with reporting_unwritten():
        scribe.end_by_force(folder.events, EndedRecord(outcome="interrupted", exit_code=128 + number))


def summary_of(folder: RunFolder, ending: Ending, wall_s: float) -> dict[str, Any]:
    """Returns the result of a run for `run.json`."""
    from engine.core.checks.equality import step_hash
    from engine.core.checks.trajectory import trajectory_hash

    run_state = ending.view.run_state
    launched_at_ns = run_state.launched_at_ns
    last = max(run_state.validations, default=None)
    sets = () if last is None else run_state.validations[last]
    return {
        "run_dir": str(folder.path),
        "outcome": ending.outcome,
        "exit_code": ending.exit_code,
        "error": None if ending.error is None else str(ending.error),
        "steps": run_state.committed + 1,
        "resumed_after": run_state.begun if run_state.begun >= 0 else None,
        "kept": run_state.kept,
        "not_kept": run_state.not_kept,
        "best_step": run_state.best(),
        "stopped_early": run_state.stopped_early or None,
        "loss_first": run_state.losses[0] if run_state.losses else None,
        "loss_last": run_state.losses[-1] if run_state.losses else None,
        "validation_loss": sets[0].loss if sets else None,
        "validation_metric": next(iter(sets[0].metrics.values()), None) if sets else None,
        "evaluations": [asdict(evaluation) for evaluation in sets],
        "trajectory": trajectory_hash(run_state.rows) if run_state.rows else None,
        "weights": step_hash(run_state.rows) or None,
        "weights_step": run_state.rows[-1].step if run_state.rows else None,
        "missing": list(ending.missing),
        "wall_s": round(wall_s, 3),
        "launch_s": round((launched_at_ns - ending.started_at_ns) / 1e9, 3) if launched_at_ns else None,
        "train_s": round((ending.ended_at_ns - launched_at_ns) / 1e9, 3) if launched_at_ns else None,
        "twin_s": None,
        "peak_stash": {view.worker: view.peak_stash for view in ending.view.workers},
        "loggers": [*ending.loggers],
        "peak_memory_mib": {view.worker: round(view.peak_memory_kib / 1024, 1) for view in ending.view.workers},
    }


# Errors of a run.json that is of another version, half written, or something else.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)


def twin_rows(
    job: Job, folder: RunFolder, scribe: Scribe, run: Callable[[Job, RunFolder], Ending], say: Callable[[str], None]
) -> list[TrajectoryRow]:
    """Returns the rows of a run's fault-free twin: a kept one, or a new one from `run`, with files in ``twin/``.

    The losses of the twin are added to the events of the run, because reports read only these. `say` gets a line about
    a kept twin that does not count, and about a new one that cannot be kept.

    Raises BambooError if the twin did not finish.
    """
    from engine.files.trajectory_file import trajectory_rows, trajectory_text

    name = _naming()(job)
    twin = None
    if name:
        try:
            stored = scribe.ask("kept twin", job.results, name)
            twin = None if stored is None else trajectory_rows(stored, folder.twin.trajectory)
        except StorageError as error:
            say(f"the kept twin does not count: {error}")
    is_new = twin is None
    if twin is None:
        twin = _new_rows(job, folder, scribe, run)
    scribe.make_folder(folder.twin.path, folder.path)
    scribe.write(folder.twin.trajectory, trajectory_text(twin))
    if is_new and name:
        try:
            scribe.ask("keep twin", job.results, name, str(folder.twin.trajectory))
        except StorageError as error:
            say(f"the twin is not kept for later runs: {error}")
    losses = {row.step: row.loss for row in twin if row.loss is not None}
    scribe.add(folder.events, TwinRecord(losses=tuple(sorted(losses.items()))))
    return twin


def reusable_twins(runs: Iterable[RunFolder]) -> set[str]:
    """Returns the names of the twins that would be reused by a new run of the job of one of these runs."""
    from engine.files.atomic_write import open_to_read

    name_of, names = _naming(), set()
    for run in runs:
        with contextlib.suppress(*_UNREADABLE), open(open_to_read(run.run_json), "rb") as file:
            names.add(name_of(Job(**json.load(file)["job"])))
    return {name for name in names if name}


def _naming() -> Callable[[Job], str | None]:
    from engine.files.host_facts import host_facts
    from engine.files.jobs.checkpoint_place import with_weights_hash
    from engine.files.jobs.user_files import data_files
    from engine.files.trajectory_file import own_sources

    facts, sources = host_facts(Path.cwd()), own_sources()
    return lambda job: fingerprint(with_weights_hash(job), facts, sources, data_files(job))


def _new_rows(
    job: Job, folder: RunFolder, scribe: Scribe, run: Callable[[Job, RunFolder], Ending]
) -> list[TrajectoryRow]:

    own = folder.twin
    scribe.make_folder(own.logs, folder.path)
    ending = run(twin_of(job), own)
    scribe.add(own.events, EndedRecord(outcome=ending.outcome, exit_code=ending.exit_code))
    if ending.exit_code:
        is_interrupted = ending.outcome == "interrupted"
        why = "interrupted in the twin" if is_interrupted else f"the fault-free twin did not finish: {ending.error}"
        raise BambooError(why, ending.exit_code)
    return ending.view.run_state.rows


_PASSED_ON = ("faults", "grace_s", "injectable", "notices")  # fields of a case for its session
_OF_THE_END = ("the last records", "trajectory.csv", "the result in run.json", "the seal")  # lost if the disk fails
_QUICK_BYTES = 10_000_000  # of events, which are read in half a second; an interrupted command has no more time


def run_case(case: Case, etcd: EtcdSettings | None, screen: Screen, server: Spawner | None = None) -> CaseResult:
    """Runs a case in a new run folder; start a fork `server` after `mark_processes`, so that leftovers are found.

    Raises BambooError if the run could not be started.
    """
    return required(run_case_on(case, etcd, screen, server), "a run on one host goes on with no other one")


def run_case_on(
    case: Case, etcd: EtcdSettings | None, screen: Screen, server: Spawner | None, seat: FailoverContext | None = None
) -> CaseResult | None:
    """Runs a case on the hosts of a server; None if this host has handed over. Raises BambooError.

    With a folder in its `seat`, this host continues what another one has begun, or starts it again.
    """
    from engine.files.jobs import job_layers
    from engine.files.jobs.checkpoint_place import hash_as_given, with_whole_place
    from engine.models.model_registry import unreadable_files
    from engine.runtime.agent.scribe_work import scribe_for
    from engine.runtime.process.interrupts import holding

    started_s, job = time.monotonic(), case.scenario.job
    is_in_process = server is not None and server.pid == os.getpid()
    with contextlib.ExitStack() as stack:
        if seat is not None and seat.scribe is not None:  # of a host that takes over, which outlives the run here
            scribe = seat.scribe
        else:
            scribe = stack.enter_context(scribe_for(is_in_process, {"sweep": _sweep}))
        scribe.try_place(job, is_in_process)
        if problems := unreadable_files(job, begins=case.origin is None):
            raise UserError(problems)
        init = case.origin.init if case.origin else hash_as_given(job.init, case.init)
        case = replace(case, init=init, scenario=replace(case.scenario, job=with_whole_place(job)))
        job_layers.note(case.scenario.job)
        own = seat.folder if seat else None
        if own is not None:
            with holding() as interrupts, interrupts.forcing(partial(note_forced_end, own, scribe)):
                return _run_in(own, scribe, case, etcd, screen, server, started_s, seat)
        with in_new_folder(scribe, job.results, case.name, screen.say) as folder:
            scribe.tell("sweep", job.results, named="")
            return _run_in(folder, scribe, case, etcd, screen, server, started_s, seat)


def _sweep(desk: object, results: str) -> None:
    from engine.harness.dead_runs import delete_dead_stores

    delete_dead_stores(Path(results))


def _run_in(
    folder: RunFolder,
    scribe: Scribe,
    case: Case,
    etcd: EtcdSettings | None,
    screen: Screen,
    server: Spawner | None,
    started_s: float,
    seat: FailoverContext | None,
) -> CaseResult | None:
    from engine.harness.leak_check import LeakCheck
    from engine.harness.state_lost import Restarts
    from engine.runtime.agent.keeper import place_of
    from engine.runtime.agent.run_state import LEFT, FailoverContext

    text = "" if case.file is None else whole_text(case.file)  # the user may change the file during the run
    if text:
        scribe.write(folder.path / "scenario.yaml", text)
    home = seat.inherited.home if seat and seat.inherited else folder.path
    case = replace(case, begun_as=home.name)
    scribe.write(folder.run_json, facts_text(case, folder.path.name))
    traces = LeakCheck() if case.scenario.expect.leftovers else None
    drive = partial(_drive, screen=screen, etcd=etcd, server=server, seat=FailoverContext(scribe=scribe))
    options: dict[str, Any] = {name: getattr(case, name) for name in _PASSED_ON}
    job = case.scenario.job
    place, run = place_of(job, str(home)), home.name
    restarts = Restarts(Ladder(job.restarts), place, run, screen.say, case.origin)
    options |= {"origin": case.origin, "revive": restarts.revive} | (
        {"seat": seat._replace(scribe=scribe)} if seat else {}
    )
    ending = drive(job, folder, run_id=case.run_id or folder.path.name, **options)
    if ending.outcome == LEFT:
        scribe.add(folder.events, EndedRecord(outcome=LEFT, exit_code=ending.exit_code))
        return None
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
    """Returns the result of a finished run after its comparison and checks, and stores it; raises StorageError.

    `drive` runs the twin, on this host alone, as the bits are the same.
    """
    from engine.files.events_file import read_history
    from engine.files.trajectory_file import trajectory_text

    job, expect, faults, rows = case.scenario.job, case.scenario.expect, case.faults, ending.view.run_state.rows
    if case.file is not None:
        scribe.add(folder.events, scenario_record(case.file, text))
    scribe.write(folder.trajectory, trajectory_text(rows))
    scribe.await_file(folder.events)
    if ending.outcome == "interrupted" and folder.events.stat().st_size > _QUICK_BYTES and not faults:
        screen.say("a long run: its recoveries are in `bamboo report`")
        history = RunHistory(job)
    else:
        history = read_history(folder.events)
    observation = Observation(ending.exit_code, str(ending.error or ""), history, leftovers=left)
    other = "the run was resumed with other bits" if case.origin is not None and case.origin.other_bits else ""
    if why := why_no_twin(expect, faults, observation) or other:
        scribe.add(folder.events, NotComparedRecord(why=why))
    else:

        def run_twin(twin: Job, own: RunFolder) -> Ending:
            screen.say("running the fault-free twin to compare weights")
            return drive(twin, own, run_id=f"{folder.path.name}-twin", injectable=False)

        begun_s = time.monotonic()
        twin = compared(job, observation.history, lambda: rows, folder, scribe, run_twin, screen.say)
        observation = replace(observation, twin=twin)
        summary = {**summary, "twin_s": round(time.monotonic() - begun_s, 3)}
    result = judged(case.scenario, faults, folder.path, observation)
    result = replace(result, run_error=ending.error, summary=summary, is_scenario=case.file is not None)
    scribe.write(folder.run_json, facts_text(case, folder.path.name, result.to_plain()))
    scribe.add(folder.events, *result.records())
    scribe.seal(folder, result.ended)
    return result


def _unstored(
    folder: RunFolder, scribe: Scribe, case: Case, ending: Ending, wall_s: float, error: StorageError
) -> CaseResult:
    """Returns the result of a run whose files could not be written: figures without a verdict on the weights."""
    ending = ending.unstored(error)
    if scribe.why:
        ending = replace(ending, missing=(*ending.missing, *_OF_THE_END))
    observation = Observation(ending.exit_code, str(ending.error), RunHistory(case.scenario.job))
    result = judged(case.scenario, case.faults, folder.path, observation)
    record_failure(folder, scribe, ending.error or error)
    summary = summary_of(folder, ending, wall_s)
    return replace(result, run_error=ending.error, summary=summary, is_scenario=case.file is not None)


def _drive(job: Job, folder: RunFolder, *, screen: Screen, **options: Any) -> Ending:
    """Runs a job and its loggers in a run folder, with the `options` of `run_session`."""
    from engine.files.host_facts import host_record
    from engine.observers.observers import observing
    from engine.runtime.agent.run_state import LEFT
    from engine.runtime.agent.session import run_session

    with observing(job, folder.events, folder.logs, screen.say) as observers:
        with screen.picture(job, folder.events) as show:
            watch = observers.watching(show, lambda view: bool(view.run_state.losses))
            host = host_record(datetime.now())
            if (server := options["server"]) is not None and server.host:
                lease = required(options["seat"].lease, "each of several hosts keeps a lease")
                host = replace(host, node=server.host, run_id=options["run_id"], lease_s=lease.ttl_s)
            ending = run_session(job, folder.events, folder.logs, watch, host=host, **options)
        if ending.outcome == LEFT:
            return ending
        return replace(ending, loggers=observers.finish(ending.view.run_state.committed))


def compared(
    job: Job,
    history: RunHistory,
    rows: Callable[[], list[TrajectoryRow]],
    folder: RunFolder,
    scribe: Scribe,
    run: Callable[[Job, RunFolder], Ending],
    say: Callable[[str], None],
) -> ComparisonRecord | BambooError:
    """Records and returns the comparison with the twin that `run` makes, or its error; `rows` are of the job's run."""
    scribe.add(folder.events, ComparingRecord())
    try:
        comparison = compare(rows(), twin_rows(job, folder, scribe, run, say), history)
    except BambooError as error:
        scribe.add(folder.events, NotComparedRecord(why=str(error).splitlines()[0]))
        return error
    scribe.add(folder.events, comparison)
    return comparison
