"""Runs a case on a bed of hosts to break: agents, strikes, the merged history, the twin on one host, the checks.

Rules: the bed is gone before anything is judged, also after an error. The run folder has the history of all hosts, so
reports read it as that of any other run; the folders of the hosts lie in ``bed``, the output of agents in ``logs``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from engine.core.checks.expectations import Check, HostStrike, Observation, exit_code, host_checks, why_no_twin
from engine.core.checks.proof import compare
from engine.core.errors import BambooError, ExitCode
from engine.core.history.process_records import ComparingRecord, ComparisonRecord, NotComparedRecord
from engine.core.job.job import Job
from engine.files.atomic_write import write_atomically
from engine.files.events_file import read_history
from engine.files.jobs.form import scenario_text
from engine.files.run_folder import RunFolder, delete_tree
from engine.files.trajectory_file import trajectory_rows
from engine.harness.case import Case, CaseResult, case_of_file, facts_text, judged, scenario_record, whole_text
from engine.harness.case_runner import in_new_folder, twin_rows
from engine.harness.host_striker import BedAgents, BedPlan, HostStriker, write_history
from engine.harness.leak_check import LeakCheck
from engine.harness.testbed import BedEtcd, HostBed
from engine.runtime.agent.scribe_work import scribe_for
from engine.runtime.process.interrupts import RunInterruptedError, breakable

if TYPE_CHECKING:
    from engine.core.history.run_history import RunHistory
    from engine.core.history.run_records import ScenarioRecord
    from engine.files.jobs.scenario_file import LoadedScenario
    from engine.harness.screen import Screen
    from engine.runtime.agent.run_state import Ending
    from engine.runtime.agent.scribe import Scribe


APART_S = 3600  # the clock of each host is so far ahead of that of the one before
_LOOK_S = 0.01
_STILL_S = 180.0  # without any record of any host, after which the run is ended
_TOLD_EVERY_S = 10.0
_LATE = re.compile(r"its workers were ended ([0-9.]+) s after")  # the last word of an agent that is cut off


@dataclass(slots=True)
class _BedEnd:
    """The end of a run on a bed, as it was seen from outside."""

    codes: Mapping[str, int] = field(default_factory=dict)
    strikes: Sequence[HostStrike] = ()
    folders: Sequence[RunFolder] = ()
    ahead_ns: Mapping[str, int] = field(default_factory=dict)
    error: BambooError | None = None


def run_on_bed(loaded: LoadedScenario, num_hosts: int, lease_s: int, screen: Screen) -> CaseResult:
    """Runs the case of a scenario file on so many hosts; call it in the main thread, after `mark_processes`.

    Raises:
        EnvironmentLacksError: this machine makes no hosts, with the reason that `bamboo doctor` gives.
        BambooError: the run could not be begun.
    """
    started_s = time.monotonic()
    case = case_of_file(loaded)
    job = case.scenario.job
    with (
        scribe_for(is_in_process=False) as scribe,
        HostBed(num_hosts, APART_S) as bed,
        in_new_folder(scribe, job.results, case.name, screen.say) as folder,
    ):
        scribe.write(folder.path / "scenario.yaml", text := whole_text(loaded))
        scribe.write(folder.run_json, facts_text(case, folder.path.name))
        traces = LeakCheck() if case.scenario.expect.leftovers else None
        ended = _trained(case, bed, folder, lease_s, screen)
        left = None if traces is None else traces.left(folder.logs, folder.path.name, None, 0)
        wall_s = time.monotonic() - started_s
        return _concluded(case, scenario_record(loaded, text), folder, scribe, ended, left, wall_s, lease_s, screen)


def _trained(case: Case, bed: HostBed, folder: RunFolder, lease_s: int, screen: Screen) -> _BedEnd:
    """Runs the job on the hosts and strikes them; the bed is closed."""
    store, end = folder.logs / "etcd", _BedEnd()
    store.mkdir(mode=0o700)
    run = BedPlan(folder, store / "job.yaml", lease_s)
    write_atomically(run.job_file, _job_text(case.scenario.job))
    try:
        with BedEtcd(bed.hosts, store, folder.logs) as etcd:
            end.ahead_ns = {each.name: each.ahead_ns for each in bed.hosts}
            screen.say(f"{len(bed.hosts)} hosts, with clocks an hour apart and an etcd of three members over TLS")
            agents = BedAgents(run, bed, etcd)
            with HostStriker(case.scenario.host_faults, agents, etcd, screen.say) as striker:
                try:
                    end.error = _followed(agents, striker, case.scenario.job, screen.say)
                except RunInterruptedError as error:
                    end.error = error
                end.strikes = [_with_spare(each, run) for each in striker.strikes]
                end.codes, end.folders = agents.codes, agents.folders
    finally:
        bed.close()
        delete_tree(store, folder.path)
    return end


def _with_spare(strike: HostStrike, run: BedPlan) -> HostStrike:
    """Returns the strike of a link with the time that was left when the workers had ended.

    The agent says how old its last renewal was when it ended its workers, and the file with its words when that was.
    """
    log = run.log(strike.node)
    if strike.fault.do != "cut-host" or strike.ended_ns is None:
        return strike
    if (match := _LATE.search(log.read_text(encoding="utf-8", errors="replace"))) is None:
        return strike
    ended_at_ns = time.time_ns() - (time.monotonic_ns() - strike.at_ns) + strike.ended_ns
    age_ns = int(float(match[1]) * 1e9) + ended_at_ns - int(os.path.getmtime(log) * 1e9)
    return replace(strike, spare_ns=run.lease_s * 1_000_000_000 - age_ns)


def _job_text(job: Job) -> str:
    """Returns the job as a file that names each field, so that no file of the user's changes any."""
    plain = {name: value for name, value in asdict(job).items() if name != "results"}
    return scenario_text({"version": 1, **plain})


def _followed(agents: BedAgents, striker: HostStriker, job: Job, say: Callable[[str], None]) -> BambooError | None:
    """Follows a run to the ends of all agents, and strikes meanwhile; returns the error of a run that stands still."""
    told_s = moved_s = time.monotonic()
    told, seen = -2, -1
    while not agents.have_ended:
        with breakable():
            time.sleep(_LOOK_S)
        agents.look()
        striker.look()
        now_s = time.monotonic()
        if agents.num_records != seen:
            seen, moved_s = agents.num_records, now_s
        if agents.committed != told and (told < 0 <= agents.committed or now_s - told_s > _TOLD_EVERY_S):
            told, told_s = agents.committed, now_s
            if told >= 0:
                say(f"step {told} of {job.steps}; host {agents.coordinates} coordinates")
        if now_s - moved_s > _STILL_S:
            text = f"no host has recorded anything for {_STILL_S:g} s, so the bed was removed"
            return BambooError(text, ExitCode.NOT_RECOVERED)
    agents.look()
    striker.settle()
    return None


def _concluded(
    case: Case,
    scenario: ScenarioRecord,
    folder: RunFolder,
    scribe: Scribe,
    end: _BedEnd,
    left: list[str] | None,
    wall_s: float,
    lease_s: int,
    screen: Screen,
) -> CaseResult:
    """Returns the result of a run that has ended, after its comparison and checks; stores all of it in its folder."""
    if not end.folders:
        raise end.error or BambooError(f"no host has begun the run: {_last_words(folder)}", _code(end))
    told = write_history(folder, end.folders, end.ahead_ns, end.strikes)
    scribe.add(folder.events, scenario)
    history = read_history(folder.events)
    code = _code(end)
    error = str(end.error) if end.error else history.error or (_last_words(folder) if code else "")
    seen = Observation(code, error, history, leftovers=left)
    job, expect = case.scenario.job, case.scenario.expect
    if why := why_no_twin(expect, (), seen):
        scribe.add(folder.events, NotComparedRecord(why=why))
    else:
        seen = replace(seen, twin=_compared(job, history, folder, scribe, screen))
    result = judged(case.scenario, (), folder.path, seen)
    own = host_checks(case.scenario.host_faults, end.strikes, end.codes, history, lease_s * 1_000_000_000)
    result = _with_checks(result, (*own, *result.checks))
    summary = _summary(folder) | {"wall_s": round(wall_s, 3), "hosts": told["hosts"]}
    result = replace(result, summary=summary, is_scenario=True, run_error=end.error)
    scribe.write(folder.run_json, facts_text(case, folder.path.name, result.to_plain()))
    scribe.add(folder.events, *result.records())
    scribe.seal(folder, result.ended)
    return result


def _with_checks(result: CaseResult, checks: tuple[Check, ...]) -> CaseResult:
    if result.is_interrupted:
        checks = tuple(each if each in result.checks else replace(each, result="not judged") for each in checks)
        return replace(result, checks=checks)
    return replace(result, checks=checks, exit_code=exit_code(checks, result.seen))


def _code(end: _BedEnd) -> int:
    """Returns the exit code of the run: that of the hosts that were not lost."""
    if end.error is not None:
        return int(end.error.exit_code)
    lost = {each.node for each in end.strikes if each.loses_host}
    return max((code for node, code in end.codes.items() if node not in lost), default=int(ExitCode.NOT_RECOVERED))


def _last_words(folder: RunFolder) -> str:
    """Returns the last line that an agent has said, of those that said something."""
    lines = []
    for path in sorted(folder.logs.glob("h*.log")):
        if text := path.read_text(encoding="utf-8", errors="replace").strip():
            lines.append(f"{path.stem}: {text.splitlines()[-1]}")
    return "; ".join(lines) or "their agents said nothing"


def _summary(folder: RunFolder) -> dict[str, Any]:
    """Returns the figures of the host that coordinated last, as the merged record of the run has them."""
    found: Any = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(folder.run_json.read_text(encoding="utf-8")).get("result")
    return {**(found if isinstance(found, dict) else {}), "run_dir": str(folder.path)}


def _compared(
    job: Job, history: RunHistory, folder: RunFolder, scribe: Scribe, screen: Screen
) -> ComparisonRecord | BambooError:
    """Records and returns the comparison with the twin on one host, or the error of the twin."""

    def run(twin: Job, own: RunFolder) -> Ending:
        from engine.runtime.agent.run_state import FailoverContext
        from engine.runtime.agent.session import run_session

        screen.say("running the fault-free twin on one host, to compare the weights with")
        return run_session(
            twin,
            own.events,
            own.logs,
            run_id=f"{folder.path.name}-twin",
            injectable=False,
            seat=FailoverContext(scribe=scribe),
        )

    scribe.add(folder.events, ComparingRecord())
    try:
        rows = trajectory_rows(folder.trajectory.read_text(encoding="utf-8"), folder.trajectory)
        comparison = compare(rows, twin_rows(job, folder, scribe, run, screen.say), history)
    except BambooError as error:
        scribe.add(folder.events, NotComparedRecord(why=str(error).splitlines()[0]))
        return error
    scribe.add(folder.events, comparison)
    return comparison
