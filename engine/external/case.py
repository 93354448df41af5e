"""A scenario on a job of another launcher: its run folder, its run, its verdict, and its record."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from math import inf
from pathlib import Path
from typing import Any

from engine.core.checks.external_report import ExternalResult, ExternalRun, external_checks
from engine.core.checks.external_verdict import ExternalVerdict, StateReport, judge
from engine.core.errors import Problem, UserError
from engine.core.faults.external import ExternalScenario
from engine.core.faults.fault import FaultKind
from engine.external.effects import missing
from engine.external.referee import JOB_FOLDER, VARIABLE, Referee
from engine.files.atomic_write import make_folder, write_atomically
from engine.files.host_facts import host_facts
from engine.files.jobs.external_file import LoadedExternal
from engine.files.jobs.library import EXTERNAL_FOLDER
from engine.files.run_folder import RunFolder, create_run_folder, run_json_text
from engine.runtime.process.interrupts import Interrupts
from engine.runtime.process.locks import folder_used
from engine.runtime.process.subprocesses import ask


@dataclass(frozen=True, slots=True)
class ExternalCase:
    """One run of a scenario, with its folder."""

    folder: Path
    result: ExternalResult

    def as_dict(self) -> dict[str, Any]:
        """Returns the case as plain values."""
        return {"run_dir": str(self.folder), **self.result.as_dict()}


def run_external(
    loaded: LoadedExternal,
    kinds: Mapping[str, FaultKind],
    results: Path,
    interrupts: Interrupts,
    hear: Callable[[str], object],
    say: Callable[[str], object],
    root: int | None = None,
) -> ExternalCase:
    """Runs the command of a scenario with its faults, and its twin without any if the scenario expects its bits.

    With `root`, a process, it strikes the job below it instead. `hear` gets the output, `say` a line about the folder.
    Raises UserError if the command cannot start or this host lacks a fault's needs, and StorageError.
    """
    scenario = loaded.scenario
    reported = _reported_by(root) if root is not None else None
    if root is None and shutil.which(scenario.command[0]) is None:
        raise UserError([Problem("command", "a program that can be started", repr(scenario.command[0]))])
    if problems := [*missing(scenario, results)]:
        raise UserError(problems)
    folder = create_run_folder(
        results / EXTERNAL_FOLDER, scenario.name.lower(), datetime.now(), secrets.token_hex(2), say
    )
    with folder_used(folder.path):
        facts = _facts(loaded)
        write_atomically(folder.run_json, run_json_text(facts))
        if root is None:
            run = Referee(scenario, kinds, folder.path, hear).run(interrupts)
        else:
            run = Referee(scenario, kinds, folder.path, hear, reported).attach(root, interrupts)
        evidence: ExternalVerdict | None = None
        if scenario.expect.needs_twin and run.end.why == "exit":
            make_folder(folder.twin.logs, folder.path)
            twin = Referee(replace(scenario, faults=()), kinds, folder.twin.path, hear).run(interrupts)
            if twin.end.why == "exit":
                evidence = _evidence(scenario, run, twin, folder)
        checks = external_checks(scenario, run, evidence)
        result = ExternalResult(run, checks, tuple(run.recoveries()), evidence)
        write_atomically(folder.run_json, run_json_text(facts | {"result": result.as_dict()}))
    return ExternalCase(folder.path, result)


def _evidence(scenario: ExternalScenario, run: ExternalRun, twin: ExternalRun, folder: RunFolder) -> ExternalVerdict:
    """Returns the verdict by what both have reported; without hashes of the state, by their checkpoints."""
    reports, of_twin = run.reports, twin.reports
    distances: dict[tuple[int, str], float] = {}
    if scenario.expect.trajectory and not (reports.states and of_twin.states):
        question = {"run": str(folder.path / JOB_FOLDER), "twin": str(folder.twin.path / JOB_FOLDER)}
        answer = ask("engine.external.checkpoint_answer", question)
        reports, of_twin = (
            replace(both, states=[StateReport(*state) for state in answer[name]])
            for both, name in ((reports, "run"), (of_twin, "twin"))
        )
        distances = {(step, name): inf if far is None else far for step, name, far in answer["distances"]}
    return judge(reports, of_twin, run.strikes_ns, scenario.expect.tolerance, distances)


def _reported_by(root: int) -> Path | None:
    """Returns the folder to which a running job reports, if it has one; raises UserError if it cannot be struck."""
    try:
        environment = Path(f"/proc/{root}/environ").read_bytes().decode("utf-8", "surrogateescape").split("\0")
    except OSError as error:
        raise UserError([Problem("--attach", "a running process of yours", str(root), str(error.strerror))]) from error
    values = [line.partition("=")[2] for line in environment if line.startswith(f"{VARIABLE}=")]
    return Path(values[0]) if values and Path(values[0]).is_dir() else None


def _facts(loaded: LoadedExternal) -> dict[str, object]:
    scenario = loaded.scenario
    facts: dict[str, object] = {
        "name": scenario.name,
        "about": scenario.about,
        "command": list(scenario.command),
        "launcher": scenario.launcher.name,
        "faults": [each.in_words() for each in scenario.faults],
        "scenario": loaded.document.value,
    }
    return {"external": facts, "started": datetime.now().astimezone().isoformat(), **host_facts(Path.cwd())}
