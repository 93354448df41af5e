"""`bamboo validate`: checks files of scenarios, matrices and jobs without running them."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from typing import Annotated, Any

import typer

from bamboo_cli.completion import library_files
from bamboo_cli.echo import echo
from engine.core.errors import BambooError, ExitCode, Problem, UserError
from engine.core.job.job import Job
from engine.core.texts import counted

EPILOG = (
    "Examples:  bamboo validate kill-middle-stage  |  bamboo validate mine.yaml job.yaml  |  "
    "bamboo validate --json mine.yaml"
)


def validate(
    files: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE",
            help="scenario, matrix or job files, or names of shipped ones",
            show_default=False,
            autocompletion=library_files,
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of random choices (default: the job's seed).", min=0)
    ] = None,
) -> None:
    """Check scenario, matrix and job files: valid fields, faults that can strike, victims that exist.

    Exit with 2 if a file is wrong, with 5 if a name is unknown.
    """
    results = [_checked(each, seed, as_json) for each in files]
    code = min((each["exit_code"] for each in results if each["exit_code"]), default=ExitCode.OK)
    if as_json:
        echo(json.dumps({"exit_code": int(code), "files": results}))
    raise typer.Exit(code)


def _checked(name: str, seed: int | None, as_json: bool) -> dict[str, Any]:
    try:
        text, facts = _read(name, seed)
    except BambooError as error:
        problems = [asdict(each) for each in error.problems] if isinstance(error, UserError) else []
        if not as_json:
            for line in str(error).splitlines():
                echo(f"bamboo: {line}", err=True)
        code = int(error.exit_code)
        return {"file": name, "valid": False, "exit_code": code, "problems": problems, "error": str(error)}
    if not as_json:
        echo(f"{name}: valid: {text}")
    return {"file": name, "valid": True, "exit_code": 0, "problems": [], **facts}


def _read(name: str, seed: int | None) -> tuple[str, dict[str, Any]]:
    """Returns the content of a file in words and as plain values; raises BambooError for a wrong file."""
    from engine.core.checks.expectations import holds_anyway
    from engine.core.faults.fault import ANY_HOSTS
    from engine.external.kinds import external_kinds
    from engine.files.jobs.external_file import is_external, load_external
    from engine.files.jobs.job_file import merge
    from engine.files.jobs.job_layers import file_layer, kind_of
    from engine.files.jobs.library import find_external, find_file, library_names
    from engine.files.jobs.matrix_file import read_matrix
    from engine.files.jobs.scenario_file import load_document
    from engine.files.strict_yaml import read_yaml
    from engine.harness.job_checks import readable
    from engine.runtime.faults.registry import kinds

    path = find_external(name) or find_file(name, "scenario, matrix or job", library_names())
    document = read_yaml(path)
    if document.value is None and not document.problems:
        expected = "a scenario, a matrix or a job"
        raise UserError([Problem("", expected, "an empty file", "", document.source, 1, 1)])
    if is_external(document):
        foreign = load_external(path, document, external_kinds(kinds()), is_run=False).scenario
        faults = [fault.in_words() for fault in foreign.faults]
        text = f"{counted(len(faults), 'fault')}, expects {foreign.expect.outcome}; launcher: {foreign.launcher.name}"
        return text, {"faults": faults, "launcher": foreign.launcher.name}
    kind = kind_of(document)
    if kind == "matrix":
        matrix = read_matrix(str(path), kinds(), offered=readable)
        cells = [each.cell.name for each in matrix.cells]
        text = f"a matrix of {len(cells)} cells; job: {matrix.job_from}"
        jobs = [each.loaded.scenario.job for each in matrix.cells]
        facts = {"cells": cells, "job_from": matrix.job_from, "needs_trust": bool(matrix.foreign)}
        return text + _not_imported(*jobs) + _needs_trust(matrix.foreign), facts
    if kind in ("job", "run"):
        job = merge([file_layer(path)], readable).job
        uncounted = f"{counted(job.epochs, 'epoch')} of data that are not counted here"
        steps = counted(job.steps, "step") if job.has_steps else uncounted
        text = f"a job: {job.model} in {job.pipelines} x {job.cut}, {steps}"
        return text + _not_imported(job), {"job": asdict(job.masked)}
    loaded = load_document(path, document, kinds(), seed, offered=readable, on=ANY_HOSTS)
    count = max(len(loaded.faults), len(loaded.scenario.faults))  # none are drawn without a program
    faults = [each.in_words(loaded.scenario.job.slot_noun) for each in loaded.faults]
    text = f"{counted(count, 'fault')}, expects {loaded.scenario.expect.outcome}; job: {loaded.job_from}"
    text += "" if loaded.scenario.job.has_steps else "; steps not known, because the samples are not counted here"
    text += _not_imported(loaded.scenario.job) + _needs_trust(loaded.foreign)
    scenario = loaded.scenario
    notes = holds_anyway(scenario.expect, scenario.job, {each.do for each in scenario.faults}, kinds())
    text = "; ".join([text, *notes])
    return text, {"notes": notes, "faults": faults, "job_from": loaded.job_from, "needs_trust": bool(loaded.foreign)}


def _needs_trust(foreign: Collection[Problem]) -> str:
    """Returns the flag of a run that takes these values from the file; empty if there are none."""
    return "; to run it, pass --trust-code" if foreign else ""


def _not_imported(*jobs: Job) -> str:
    """Returns the names of the user's code that the jobs name, none of which a check of files runs."""
    from engine.models.model_registry import is_own

    own = dict.fromkeys(name for job in jobs for name in (job.model, job.data, job.schedule) if is_own(name))
    return f"; not imported: {', '.join(own)}" if own else ""
