"""Runs a case on a bed of hosts to break: agents, strikes, the merged history, the twin on one host, the checks.

Rules: the bed is removed before anything is judged, even after an error. The run folder has the history of all hosts,
so reports read it like any other; the folders of the hosts are in ``bed``, the output of their agents in ``logs``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from engine.core.checks.expectations import HostStrike, Observation, OutsideView, why_no_twin
from engine.core.errors import BambooError, ExitCode
from engine.core.history.process_records import NotComparedRecord
from engine.core.job.job import Job
from engine.files.atomic_write import write_atomically
from engine.files.events_file import read_history
from engine.files.jobs.library import scenario_text
from engine.files.run_folder import RunFolder, delete_tree
from engine.files.trajectory_file import trajectory_rows
from engine.harness.case import Case, CaseResult, case_of_file, facts_text, judged, scenario_record, whole_text
from engine.harness.case_runner import compared, in_new_folder
from engine.harness.host_striker import BedAgents, BedPlan, HostStriker, write_history
from engine.harness.leak_check import LeakCheck
from engine.harness.testbed import BedEtcd, HostBed
from engine.runtime.agent.scribe_work import scribe_for
from engine.runtime.process.interrupts import RunInterruptedError, rest

if TYPE_CHECKING:
    from engine.core.history.run_records import ScenarioRecord
    from engine.files.jobs.scenario_file import LoadedScenario
    from engine.harness.screen import Screen
    from engine.runtime.agent.run_state import Ending
    from engine.runtime.agent.scribe import Scribe


APART_S = 3600  # the clock of each host is this far ahead of the previous one's
_LOOK_S = 0.01
_STILL_S = 180.0  # without any record of any host, after which the run is ended
_TOLD_EVERY_S = 10.0
_LATE = re.compile(r"its workers were ended ([0-9.]+) s after")  # the last word of an agent that is cut off


@dataclass(slots=True)
class _BedEnd:
    """The end of a run on a bed, as seen from outside."""

    codes: Mapping[str, int] = field(default_factory=dict)
    strikes: Sequence[HostStrike] = ()
    folders: Sequence[RunFolder] = ()
    ahead_ns: Mapping[str, int] = field(default_factory=dict)
    error: BambooError | None = None


def run_on_bed(loaded: LoadedScenario, num_hosts: int, lease_s: int, screen: Screen) -> CaseResult:
    """Runs the case of a scenario file on `num_hosts`; call it in the main thread, after `mark_processes`.

    Raises:
        EnvironmentLacksError: this machine cannot create hosts, with the reason that `bamboo doctor` gives.
        BambooError: the run could not be started.
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
    """Runs the job on the hosts and strikes them; closes the bed."""
    store, end = folder.logs / "etcd", _BedEnd()
    store.mkdir(mode=0o700)
    run = BedPlan(folder, store / "job.yaml", lease_s)
    # It names each field, so that no file of the user's changes any.
    job = {name: value for name, value in asdict(case.scenario.job).items() if name != "results"}
    write_atomically(run.job_file, scenario_text({"version": 1, **job}))
    try:
        with BedEtcd(bed.hosts, store, folder.logs) as etcd:
            end.ahead_ns = {host.name: host.ahead_ns for host in bed.hosts}
            screen.say(f"{len(bed.hosts)} hosts, with clocks an hour apart and an etcd of three members over TLS")
            agents = BedAgents(run, bed, etcd)
            with HostStriker(case.faults, agents, etcd, screen.say) as striker:
                try:
                    end.error = _followed(agents, striker, case.scenario.job, screen.say)
                except RunInterruptedError as error:
                    end.error = error
                end.strikes = [_with_spare(strike, run) for strike in striker.strikes]
                end.codes, end.folders = agents.codes, agents.folders
    finally:
        bed.close()
        delete_tree(store, folder.path)
    return end


def _with_spare(strike: HostStrike, run: BedPlan) -> HostStrike:
    """Returns the strike of a link with the time that was left of the lease when the workers had ended.

    The agent's log says how old its last renewal was when it ended its workers, and the time of the file when that was.
    """
    log = run.log(strike.node)
    if strike.fault.do != "cut-host" or strike.ended_ns is None:
        return strike
    if (match := _LATE.search(log.read_text(encoding="utf-8", errors="replace"))) is None:
        return strike
    ended_at_ns = time.time_ns() - (time.monotonic_ns() - strike.at_ns) + strike.ended_ns
    age_ns = int(float(match[1]) * 1e9) + ended_at_ns - int(os.path.getmtime(log) * 1e9)
    return replace(strike, spare_ns=run.lease_s * 1_000_000_000 - age_ns)


def _followed(agents: BedAgents, striker: HostStriker, job: Job, say: Callable[[str], None]) -> BambooError | None:
    """Follows a run to the ends of all agents, and strikes meanwhile; returns an error if the run stalls."""
    said_s = moved_s = time.monotonic()
    step, num_records = -2, -1
    while not agents.have_ended:
        rest(_LOOK_S)
        agents.look()
        striker.look()
        now_s = time.monotonic()
        if agents.num_records != num_records:
            num_records, moved_s = agents.num_records, now_s
        if agents.committed != step and (step < 0 <= agents.committed or now_s - said_s > _TOLD_EVERY_S):
            step, said_s = agents.committed, now_s
            if step >= 0:
                say(f"step {step} of {job.steps}; host {agents.coordinates} coordinates")
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
    """Returns the result of a finished run after its comparison and checks; stores it in the folder."""
    if not end.folders:
        raise end.error or BambooError(f"no host has begun the run: {_last_words(folder)}", _code(end))
    merged = write_history(folder, end.folders, end.ahead_ns, end.strikes)
    scribe.add(folder.events, scenario)
    history = read_history(folder.events)
    code = _code(end)
    error = str(end.error) if end.error else history.error or (_last_words(folder) if code else "")
    outside = OutsideView(end.strikes, end.codes, lease_s * 1_000_000_000)
    observation = Observation(code, error, history, leftovers=left, outside=outside)
    job, expect = case.scenario.job, case.scenario.expect
    if why := why_no_twin(expect, case.faults, observation):
        scribe.add(folder.events, NotComparedRecord(why=why))
    else:
        rows = partial(trajectory_rows, folder.trajectory.read_text(encoding="utf-8"), folder.trajectory)
        run = partial(_run_twin, run_id=f"{folder.path.name}-twin", scribe=scribe, say=screen.say)
        observation = replace(observation, twin=compared(job, history, rows, folder, scribe, run, screen.say))
    result = judged(case.scenario, case.faults, folder.path, observation)
    summary = _summary(folder) | {"wall_s": round(wall_s, 3), "hosts": merged["hosts"]}
    result = replace(result, summary=summary, is_scenario=True, run_error=end.error)
    scribe.write(folder.run_json, facts_text(case, folder.path.name, result.to_plain()))
    scribe.add(folder.events, *result.records())
    scribe.seal(folder, result.ended)
    return result


def _code(end: _BedEnd) -> int:
    """Returns the exit code of the run: that of the surviving hosts."""
    if end.error is not None:
        return int(end.error.exit_code)
    lost = {strike.node for strike in end.strikes if strike.loses_host}
    return max((code for node, code in end.codes.items() if node not in lost), default=int(ExitCode.NOT_RECOVERED))


def _last_words(folder: RunFolder) -> str:
    lines = []
    for path in sorted(folder.logs.glob("h*.log")):
        if text := path.read_text(encoding="utf-8", errors="replace").strip():
            lines.append(f"{path.stem}: {text.splitlines()[-1]}")
    return "; ".join(lines) or "their agents said nothing"


def _summary(folder: RunFolder) -> dict[str, Any]:
    """Returns the figures of the host that coordinated last, from the merged record of the run."""
    result: Any = None
    with contextlib.suppress(OSError, ValueError):
        result = json.loads(folder.run_json.read_text(encoding="utf-8")).get("result")
    return {**(result if isinstance(result, dict) else {}), "run_dir": str(folder.path)}


def _run_twin(twin: Job, own: RunFolder, *, run_id: str, scribe: Scribe, say: Callable[[str], None]) -> Ending:
    from engine.runtime.agent.run_state import FailoverContext
    from engine.runtime.agent.session import run_session

    say("running the fault-free twin on one host to compare weights")
    seat = FailoverContext(scribe=scribe)
    return run_session(twin, own.events, own.logs, run_id=run_id, injectable=False, seat=seat)
