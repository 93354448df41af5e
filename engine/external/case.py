"""A scenario on a job of another launcher: its run folder, its run, its verdict, and its record."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from engine.core.checks.external_report import ExternalResult, ExternalRun, external_checks
from engine.core.faults.fault import FaultKind
from engine.external.referee import Referee
from engine.files.atomic_write import write_atomically
from engine.files.host_facts import host_facts
from engine.files.jobs.external_file import LoadedExternal
from engine.files.run_folder import create_run_folder, run_json_text
from engine.runtime.process.interrupts import Interrupts

EXTERNAL = "external"  # in a folder of results: its other runs are bamboo's own jobs


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
) -> ExternalCase:
    """Runs the command of a scenario once, with its faults; `hear` gets its output, `say` a line about the folder.

    Raises UserError if the command cannot be started, and StorageError if the folder cannot be written.
    """
    folder = create_run_folder(
        results / EXTERNAL, loaded.scenario.name.lower(), datetime.now(), secrets.token_hex(2), say
    )
    facts = _facts(loaded)
    write_atomically(folder.run_json, run_json_text(facts))
    run = Referee(loaded.scenario, kinds, folder.path, hear).run(interrupts)
    result = judged_run(loaded, run)
    write_atomically(folder.run_json, run_json_text(facts | {"result": result.as_dict()}))
    return ExternalCase(folder.path, result)


def judged_run(loaded: LoadedExternal, run: ExternalRun) -> ExternalResult:
    """Returns the result of a run of a scenario."""
    return ExternalResult(run, external_checks(loaded.scenario, run), tuple(run.recoveries()))


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
