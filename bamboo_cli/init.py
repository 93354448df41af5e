"""`bamboo init`: writes the first files of a project: a job, a scenario, a matrix, and a workflow for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bamboo_cli.echo import echo
from bamboo_cli.job_options import HfModel, HfRandom
from engine.core.errors import Problem, UserError
from engine.core.job.hugging_face import hugging_face_fields
from engine.core.job.job import FACTORY
from engine.files.jobs.starter import CiSystem

EPILOG = (
    "Examples:  bamboo init  |  bamboo init --model mine:Net --data mine:data --ci github  |  "
    "bamboo init --hf gpt2 --data novel.txt --ci gitlab"
)
_HERE = Path()


def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="folder to write into", show_default=False)] = _HERE,
    model: Annotated[
        str, typer.Option("--model", metavar="NAME", help="Model of the job: a built-in one, or module:factory.")
    ] = "mlp",
    data: Annotated[
        str, typer.Option("--data", metavar="NAME", help="Its data: a built-in source, a file, or module:factory.")
    ] = "",
    hf: HfModel = None,
    hf_random: HfRandom = False,
    stages: Annotated[int, typer.Option("--stages", min=2, help="Number of stages of the pipeline.")] = 3,
    ci: Annotated[
        CiSystem, typer.Option("--ci", help="Also write a workflow that runs the matrix, and its constraints.")
    ] = "none",
) -> None:
    """Write a starter job, scenario and matrix; with --ci also a workflow. Existing files are kept."""
    from engine.files.jobs.starter import (
        GITLAB,
        INCLUDES,
        JOB,
        MATRIX,
        SCENARIO,
        WORKFLOW,
        reference,
        starter,
        write_new,
    )

    for name, value in (("--model", model), ("--data", data)):
        if ":" in value and not FACTORY.fullmatch(value):
            raise UserError([Problem(name, "package.module:factory", repr(value))])
    given = {"model": None if model == "mlp" else model, "data": data}
    fields, args = hugging_face_fields(hf or "", hf_random, given)
    model = fields.get("model", model)
    files = starter(ci, model, fields.get("data", data), stages, args)
    written = write_new(folder, files)
    for path in (folder / name for name in files):
        echo(f"{path}{'' if path in written else ' (kept: it exists)'}")
    job = (folder / JOB).read_text(encoding="utf-8", errors="replace")
    if model not in job and model != "mlp":
        echo(f"next: set model: {model} in {folder / JOB}")
    if ci == "gitlab" and folder / INCLUDES not in written:
        echo(f"next: include {GITLAB} in {folder / INCLUDES}")
    if {folder / WORKFLOW, folder / GITLAB} & {*written} and not reference():
        echo("next: put a wheel of bamboo into wheels/, or set BAMBOO in the workflow to where pip can get it")
    trust = " --trust-code" if any(FACTORY.fullmatch(word) for word in job.split()) else ""
    echo(f"next: bamboo inject {folder / SCENARIO}{trust}, then bamboo matrix {folder / MATRIX}{trust}")
