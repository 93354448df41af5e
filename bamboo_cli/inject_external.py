"""`bamboo inject SCENARIO -- COMMAND`: faults in a job of another launcher."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bamboo_cli.echo import echo
from engine.core.errors import Problem, UserError

if TYPE_CHECKING:
    from engine.core.checks.expectations import Check
    from engine.external.case import ExternalCase
    from engine.files.jobs.external_file import LoadedExternal
    from engine.files.strict_yaml import Document

# The first of these verdicts that occurs in several runs decides their exit code.
WORST_FIRST = ("interrupted", "failed", "invalid", "passed")


@dataclass(frozen=True, slots=True)
class InjectOptions:
    """What the user asks for beside the scenario and the command; `run`, or process `root`, is a job that runs already.

    The fields from `run` on are those of a job of bamboo's own. With `hosts` above 0 it runs on that many simulated
    ones, whose leases last `lease_s`.
    """

    repeat: int
    dry_run: bool
    tee: bool
    as_json: bool
    trusts: bool
    junit: Path | None
    results: Path
    root: int
    run: str
    seed: int | None
    changed: Sequence[str]
    etcd: str
    plain_http: bool
    hosts: int
    lease_s: int


def inject_external(
    document: Document, command: Sequence[str], refused: Mapping[str, object], options: InjectOptions
) -> int:
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
    if options.root and (command or options.repeat > 1):
        problems.append(
            Problem("--attach", "neither a command nor --repeat", str(options.root), "the job runs already")
        )
    if problems:
        raise UserError(problems)
    external = external_kinds(kinds())
    loaded = load_external(Path(document.source), document, external, command, is_attached=bool(options.root))
    if loaded.needs_trust and not options.trusts and not options.dry_run:
        raise UserError([trust_problem(loaded)])
    if options.dry_run:
        _print_faults(loaded, options.as_json)
        return 0
    cases: list[ExternalCase] = []
    seconds: list[float] = []
    hear = partial(echo, err=True) if options.tee else str
    with holding() as interrupts:
        for _ in range(options.repeat):
            begin_s, tell = time.monotonic(), partial(echo, err=True)
            cases.append(run_external(loaded, external, options.results, interrupts, hear, tell, options.root or None))
            seconds.append(time.monotonic() - begin_s)
            result, verdict = cases[-1].result, f"{loaded.scenario.name}: {cases[-1].result.verdict_word}"
            print_verdict(verdict, result.checks, result.recoveries, cases[-1].folder, err=options.as_json)
            if interrupts.first is not None:
                break
    if options.junit is not None:
        _write_junit(options.junit, loaded, cases, seconds)
    return _print_all(loaded, cases, options.as_json)


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


def print_verdict(
    verdict: str, checks: Iterable[Check], recoveries: Iterable[object], folder: Path, *, err: bool
) -> None:
    """Prints a verdict, a line for each check and each recovery, and the folder of the run."""
    from rich.text import Text

    from bamboo_cli.tables import RESULT_STYLES, print_table

    echo(verdict, err=err)
    rows = [(Text(each.result, RESULT_STYLES[each.result]), each.name, each.text) for each in checks]
    print_table(("result", "check", "text"), (False, False, False), rows, has_head=False, err=err)
    for recovery in recoveries:
        echo(f"  {recovery}", err=err)
    echo(str(folder), err=err)


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
    worst = min(cases, key=lambda case: WORST_FIRST.index(case.result.verdict_word)).result
    if len(cases) > 1:
        echo(f"{sum(case.result.verdict_word == 'passed' for case in cases)} of {len(cases)} passed", err=as_json)
    if as_json:
        facts = {"scenario": loaded.scenario.name, "verdict": worst.verdict_word, "exit_code": int(worst.exit_code)}
        echo(json.dumps(facts | {"runs": [case.as_dict() for case in cases]}))
    return int(worst.exit_code)
