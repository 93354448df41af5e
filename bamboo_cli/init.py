"""`bamboo init`: writes the first files of a project: a job, a scenario, a matrix, and a workflow for CI."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from bamboo_cli.echo import echo
from bamboo_cli.job_options import HfModel, HfRandom
from engine.core.errors import Problem, UserError
from engine.core.job.hugging_face import hugging_face_fields
from engine.core.job.job import FACTORY
from engine.core.units import parse_duration
from engine.files.jobs.starter import CiSystem

EPILOG = (
    "Examples:  bamboo init  |  bamboo init --model mine:Net --data mine:data --ci github  |  "
    "bamboo init --hf gpt2 --data novel.txt --ci gitlab  |  "
    "bamboo init --ci github --command 'torchrun train.py' --limit 30s"
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
    command: Annotated[
        str,
        typer.Option(
            "--command",
            metavar="COMMAND",
            help="Instead of a job, the command that starts a job of another launcher: 'torchrun train.py'.",
        ),
    ] = "",
    limit: Annotated[
        str, typer.Option("--limit", metavar="TIME", help="With --command, the longest time that training may stall.")
    ] = "60s",
    ci: Annotated[
        CiSystem, typer.Option("--ci", help="Also write a workflow that runs the matrix, and its constraints.")
    ] = "none",
) -> None:
    """Write a starter job, scenario and matrix; with --ci also a workflow. Existing files are kept.

    With --command: one scenario for another launcher's job. It fails if training stalls for longer than --limit.
    """
    from engine.files.jobs.starter import command_starter, starter, write_new

    for name, value in (("--model", model), ("--data", data)):
        if ":" in value and not FACTORY.fullmatch(value):
            raise UserError([Problem(name, "package.module:factory", repr(value))])
    words = _words(command, limit, {"--model": model != "mlp", "--data": data, "--hf": hf})
    parts = {"model": None if model == "mlp" else model, "data": data}
    fields, args = hugging_face_fields(hf or "", hf_random, parts)
    model = fields.get("model", model)
    files = command_starter(words, limit, ci) if words else starter(ci, model, fields.get("data", data), stages, args)
    written = write_new(folder, files)
    for path in (folder / name for name in files):
        echo(f"{path}{'' if path in written else ' (kept: it exists)'}")
    for line in _next(folder, written, ci, "" if words else model):
        echo(f"next: {line}")


def _words(command: str, limit: str, others: Mapping[str, object]) -> list[str]:
    """Returns the words of a command, none without one; raises UserError if they, or the limit, are none."""
    problems = [Problem(name, "a job of bamboo's own", "--command", "leave one out") for name in others if others[name]]
    if not parse_duration(limit):
        problems.append(Problem("--limit", "a time such as 30s", repr(limit)))
    try:
        words = shlex.split(command)
    except ValueError as error:
        words = ["-"]
        problems.append(Problem("--command", "words as in a shell", repr(command), str(error).lower()))
    if words and problems:
        raise UserError(problems)
    return words


def _next(folder: Path, written: Sequence[Path], ci: CiSystem, model: str) -> Iterator[str]:
    """Yields what is left to do; `model` is empty for a job of another launcher."""
    from engine.files.jobs.starter import GITLAB, INCLUDES, JOB, MATRIX, SCENARIO, WORKFLOW, reference

    job = (folder / JOB).read_text(encoding="utf-8", errors="replace") if model else ""
    if model not in job and model != "mlp":
        yield f"set model: {model} in {folder / JOB}"
    if ci == "gitlab" and folder / INCLUDES not in written:
        yield f"include {GITLAB} in {folder / INCLUDES}"
    if {folder / WORKFLOW, folder / GITLAB} & {*written} and not reference():
        yield "put a bamboo wheel into wheels/, or set BAMBOO in the workflow to what pip should install"
    trust = " --trust-code" if not model or any(FACTORY.fullmatch(word) for word in job.split()) else ""
    matrix = f", then bamboo matrix {folder / MATRIX}{trust}" if model else ""
    yield f"bamboo inject {folder / SCENARIO}{trust}{matrix}"
