"""`bamboo inject SCENARIO -- COMMAND`: faults in a job of another launcher."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bamboo_cli.echo import echo
from engine.core.errors import Problem, UserError

if TYPE_CHECKING:
    from engine.external.case import ExternalCase
    from engine.files.jobs.external_file import LoadedExternal
    from engine.files.strict_yaml import Document

_WORST_FIRST = ("interrupted", "failed", "invalid", "passed")


@dataclass(frozen=True, slots=True)
class Asked:
    """What the user asks for beside the scenario and the command."""

    results: Path
    repeat: int = 1
    dry_run: bool = False
    tee: bool = False
    as_json: bool = False
    trusts: bool = False
    root: int = 0  # of a job that runs already
    junit: Path | None = None


def inject_external(document: Document, command: Sequence[str], refused: Mapping[str, object], asked: Asked) -> int:
    """Runs a scenario on another launcher's job, without the `refused` options; returns the exit code."""
    from engine.external.case import run_external
    from engine.external.kinds import external_kinds
    from engine.files.jobs.external_file import load_external, trust_problem
    from engine.runtime.faults.registry import kinds
    from engine.runtime.process.interrupts import holding

    problems = [
        Problem(name, "a scenario for a job of bamboo's own", "a command", "leave it out")
        for name, value in refused.items()
        if value
    ]
    if isinstance(document.value, dict) and "job" in document.value:
        hint = "it has a job of its own: leave the command out"
        problems.append(Problem("job", "a scenario for a job of another launcher", "a job", hint, document.source))
    if asked.root and (command or asked.repeat > 1):
        problems.append(Problem("--attach", "neither a command nor --repeat", str(asked.root), "the job runs already"))
    if problems:
        raise UserError(problems)
    known = external_kinds(kinds())
    loaded = load_external(Path(document.source), document, known, command, is_attached=bool(asked.root))
    if loaded.needs_trust and not asked.trusts and not asked.dry_run:
        raise UserError([trust_problem(loaded)])
    if asked.dry_run:
        _print_faults(loaded, asked.as_json)
        return 0
    cases: list[ExternalCase] = []
    seconds: list[float] = []
    hear = partial(echo, err=True) if asked.tee else str
    with holding() as interrupts:
        for _ in range(asked.repeat):
            begin_s, tell = time.monotonic(), partial(echo, err=True)
            cases.append(run_external(loaded, known, asked.results, interrupts, hear, tell, asked.root or None))
            seconds.append(time.monotonic() - begin_s)
            _print_case(loaded, cases[-1], asked.as_json)
            if interrupts.first is not None:
                break
    if asked.junit is not None:
        _write_junit(asked.junit, loaded, cases, seconds)
    return _print_all(loaded, cases, asked.as_json)


def _print_faults(loaded: LoadedExternal, as_json: bool) -> None:
    scenario = loaded.scenario
    faults = [each.in_words() for each in scenario.faults]
    if as_json:
        facts = {"scenario": scenario.name, "command": list(scenario.command), "launcher": scenario.launcher.name}
        echo(json.dumps(facts | {"faults": faults}))
        return
    echo(f"launcher: {scenario.launcher.name}")
    for fault in faults:
        echo(fault)


def _print_case(loaded: LoadedExternal, case: ExternalCase, as_json: bool) -> None:
    """Prints the verdict, the checks and the recoveries; to stderr if stdout is for JSON."""
    from rich.text import Text

    from bamboo_cli.tables import RESULT_STYLES, print_table

    echo(f"{loaded.scenario.name}: {case.result.verdict_word}", err=as_json)
    rows = [(Text(each.result, RESULT_STYLES[each.result]), each.name, each.text) for each in case.result.checks]
    print_table(("result", "check", "text"), (False, False, False), rows, has_head=False, err=as_json)
    for recovery in case.result.recoveries:
        echo(f"  {recovery}", err=as_json)
    echo(f"{case.folder}", err=as_json)


def _write_junit(path: Path, loaded: LoadedExternal, cases: Sequence[ExternalCase], seconds: Sequence[float]) -> None:
    """Writes the results as JUnit XML, one test for each run."""
    from engine.core.checks.cell_result import CellResult, judged
    from engine.files.atomic_write import write_named
    from engine.report.ci_text import junit_xml

    name, do = loaded.scenario.name, loaded.scenario.faults[0].do
    cells = []
    for number, (case, took_s) in enumerate(zip(cases, seconds, strict=True), 1):
        cell = f"{name} {number}" if len(cases) > 1 else name
        cells.append(CellResult(cell, *judged(case.result.checks), do, took_s, run=case.folder.name))
    write_named(path, junit_xml(name, cells))


def _print_all(loaded: LoadedExternal, cases: Sequence[ExternalCase], as_json: bool) -> int:
    worst = min(cases, key=lambda case: _WORST_FIRST.index(case.result.verdict_word)).result
    if len(cases) > 1:
        echo(f"{sum(case.result.verdict_word == 'passed' for case in cases)} of {len(cases)} passed", err=as_json)
    if as_json:
        facts = {"scenario": loaded.scenario.name, "verdict": worst.verdict_word, "exit_code": int(worst.exit_code)}
        echo(json.dumps(facts | {"runs": [case.as_dict() for case in cases]}))
    return int(worst.exit_code)
