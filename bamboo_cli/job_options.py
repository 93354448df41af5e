"""The argument JOB.yaml and the flags that describe a job, for every command that takes one.

Rules: flags are made from the fields of `Job`, never listed. They reach the engine as texts, so that a value has the
same meaning and the same error on the command line, in the environment and in a file.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer

from bamboo_cli import completion
from bamboo_cli.echo import echo
from bamboo_cli.run_options import TrustCode, caller_layer, tell_untrusted
from engine.core.checkpoint_rules import keeps_any
from engine.core.errors import BambooError, Problem, UserError, noting, problems_of
from engine.core.job.hugging_face import hugging_face_fields
from engine.core.job.job import ARGS_FIELDS, Job
from engine.files.jobs.job_value import FIELD_HELP, FIELD_TYPES
from engine.files.jobs.resolved_job import ResolvedJob

if TYPE_CHECKING:
    from engine.files.jobs.checkpoint_choice import CheckpointChoice, JobSoFar
    from engine.files.jobs.job_layers import Layer
    from engine.files.strict_yaml import Document


# The options of `bamboo run` about a checkpoint to begin after; its job is the lowest layer of the run's own.
_PANEL = "Checkpoints"
_RESULTS = "results"
AUTO = "auto"
Found = TypeVar("Found")

Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|latest|RUN|DIR[@STEP]",
        help="auto: resume this job from its newest good checkpoint, or start it if there is none (one command for "
        "the first start and every restart). RUN, latest (the newest run with a checkpoint), or a checkpoint folder "
        "or URL: resume the job of that checkpoint, at STEP or from the newest good one. Stages, schedule, "
        "redundancy, workers and the like may change.",
        rich_help_panel=_PANEL,
        show_default=False,
    ),
]
OtherBits = Annotated[
    bool,
    typer.Option(
        "--other-bits",
        help="With --resume: resume even if a changed field, machine, data file or code changes the bits.",
        rich_help_panel=_PANEL,
    ),
]


def resolve_resumed(text: str, other_bits: bool, results: Any, resolve: Callable[..., ResolvedJob]) -> ResolvedJob:
    """Returns the job that goes on from the checkpoint that `text` names, and says which; `resolve` takes its job.

    Raises:
        BambooError: the text is empty, there is no good checkpoint, or the job would give other bits.
    """
    from engine.files.jobs.checkpoint_choice import refuse_other_bits

    if not text:  # as of a variable that is not set
        raise UserError([Problem("--resume", "auto, latest, a run, or a folder or URL of checkpoints", "''")])
    folder = Path(results or os.environ.get("BAMBOO_RESULTS") or _RESULTS)
    choice = checkpoint_of(text, folder)
    resolved = resolve(kept=choice.document)
    refuse_other_bits(choice, resolved.job, other_bits)
    echo(choice.words, err=True)
    return replace(resolved, origin=replace(choice.origin, other_bits=other_bits or choice.origin.other_bits))


def resolve_auto(own_values: Mapping[str, Any], resolve: Callable[..., ResolvedJob]) -> ResolvedJob:
    """Returns the job of the command line, which goes on from its newest good checkpoint, or begins anew.

    A job that is complete ends the command.

    Raises:
        BambooError: the job is wrong, keeps nothing, has no good checkpoint among those that it has, or other bits now.
    """
    from engine.files.jobs.checkpoint_choice import refuse_other_bits

    resolved, other_bits = resolve(), own_values["other_bits"]
    job = resolved.job
    if not keeps_any(job.checkpoint_every):
        hint = "no checkpoint is written, so there is never anything to resume"
        raise UserError([Problem("checkpoint_every", "checkpoints with --resume auto", job.checkpoint_every, hint)])
    so_far = _found_for(job)
    if so_far.finished_by:
        _tell_complete(job, so_far, own_values)
        raise typer.Exit(0)
    if (choice := so_far.choice) is None:
        return resolved
    refuse_other_bits(choice, job, other_bits)
    echo(choice.words, err=True)
    return replace(resolved, origin=replace(choice.origin, other_bits=other_bits or choice.origin.other_bits))


def _tell_complete(job: Job, so_far: JobSoFar, own_values: Mapping[str, Any]) -> None:
    """Prints that the job is complete; a caller in Python gets the folder of the run first, as always."""
    run, early = so_far.finished_by, f", which stopped early at step {so_far.steps - 1}"
    text = f"all {so_far.steps} steps of this job are committed in run {run}{early * (so_far.steps < job.steps)}"
    line = f"complete: {text}; there is nothing to resume"
    echo(line, err=own_values["as_json"])
    place = {"run_dir": str(Path(job.results, run))}
    if own_values.get("keywords"):
        echo(json.dumps(place))
    if own_values["as_json"]:
        echo(json.dumps(place | {"outcome": "complete", "exit_code": 0, "error": None, "steps": so_far.steps}))


def _found_for(job: Job) -> JobSoFar:
    """Returns what the runs of a job have left."""
    from engine.files.jobs.checkpoint_choice import JobSoFar, find_for_job

    folder = Path(job.results)
    return _answered(str(folder), JobSoFar, lambda say: find_for_job(job, folder, say))


def checkpoint_of(text: str, folder: Path) -> CheckpointChoice:
    """Returns the checkpoint that `text` names."""
    from engine.files.jobs.checkpoint_choice import CheckpointChoice, find_checkpoint

    place = text if os.sep in text else str(folder)
    return _answered(place, CheckpointChoice, lambda say: find_checkpoint(text, folder, say))


def _answered(place: str, kind: type[Found], find: Callable[[Callable[[str], object]], Found]) -> Found:
    """Returns what `find` finds at a place; another process reads, as a disk may have stopped."""
    from engine.codec.values import plain_of, value_of
    from engine.runtime.agent.orders import READ_LIMIT_S, answered, heard, told

    def read() -> list[Any]:
        lines: list[str] = []
        try:
            return [lines, plain_of(find(lines.append)), None]
        except BambooError as error:
            return [lines, None, told(error)]

    answered(place, lambda: Path(place.partition("@")[0]).exists() and None)  # soon, on a disk that has not stopped
    messages, plain, error = answered(place, read, READ_LIMIT_S)
    for message in messages:
        echo(message, err=True)
    if error is not None:
        raise heard(error)
    return value_of(plain, kind, "the answer")


HfModel = Annotated[
    str | None,
    typer.Option(
        "--hf",
        metavar="ID|DIR",
        help="Train a transformers model: ID or folder. Its tokenizer reads --data (FILE.txt or Hugging Face dataset).",
        rich_help_panel="Job",
        show_default=False,
    ),
]
HfRandom = Annotated[
    bool,
    typer.Option(
        "--hf-random", help="With --hf: draw the weights at random; only the config is read.", rich_help_panel="Job"
    ),
]
FLAG_FIELDS = tuple(name for name in FIELD_TYPES if name not in ARGS_FIELDS)
_ONLY_SHOWING = ("dry_run", "explained")  # flags of a command that then starts nothing
# The help of flags that deny a field.
OFF = {
    "deterministic": "do without the deterministic settings of torch and CUDA; changes bits",
    "check_pure": "skip the check that the results of layers depend on weights, buffers and inputs alone",
}
# Flags of fields whose default depends on the job, which make them false: a row each, as `--a/--no-a` takes a column.
_NOT = {"elastic": "leave every stage where it is; without --standby, refuse workers that join"}
_DEFAULTS = {each.name: each.default for each in fields(Job)}
_METAVARS: dict[Any, str] = {int: "N", float: "X", str: "TEXT"}


JobValues = Mapping[str, Any]  # of the job's argument and flags, by parameter; None for what is not given
Own = Callable[[Mapping[str, Any], ResolvedJob | None, list[Problem]], Any]
First = Callable[[Mapping[str, Any]], list[Problem]]


def takes_job(
    command: Callable[..., None],
    instead: Mapping[str, str] = {},
    *,
    program_only: bool = False,
    first: First = lambda values: [],
    own: Own | None = None,
) -> Callable[..., None]:
    """Returns the command with the job's argument and flags beside its own; it gets the `ResolvedJob` job first.

    The fields in `instead` have these values and no flags. With `program_only` the model may have fewer layers than
    there are stages. `first` is called before the job is made, and `own` behind that, without a job if that is wrong;
    both find mistakes in the command's own flags, which are told together with those of the job. The command gets what
    `own` made of its flags beside the job. Import the types in its annotations at runtime: Typer reads them.
    """
    flags = _own_flags(command, 2 if own else 1)

    def with_job(values: JobValues, **own_values: Any) -> None:
        is_plan = any(own_values.get(each) for each in _ONLY_SHOWING) and not own_values.get("build")
        last = caller_layer() if own_values.get("keywords") else None
        resolve = functools.partial(resolve_options, values, program_only, is_plan, last=last)
        problems = first(own_values)
        resolved = noting(problems, lambda: _resolved(own_values, values["results"], resolve))
        if resolved is not None and resolved.job.predict_args:
            hint = "bamboo predict --from RUN runs a trained model"
            problems.append(Problem("predict_args", "none in a job that trains", str(resolved.job.predict_args), hint))
        extra = () if own is None else (own(own_values, resolved, problems),)
        if problems or resolved is None:
            raise UserError(problems)
        command(resolved, *extra, **own_values)

    return _with_flags(command, with_job, flags, instead)


def takes_job_values(command: Callable[..., None]) -> Callable[..., None]:
    """Returns the command with the job's argument and flags beside its own; it gets their `JobValues` first.

    For a command that is not always about a job. `resolve_options` takes the values. A flag of the command's own hides
    the one of a field with that name, which `--set` sets.
    """
    own = _own_flags(command, 1)
    return _with_flags(command, command, own, {each.name: None for each in own if each.name in FLAG_FIELDS})


def _own_flags(command: Callable[..., None], num_others: int) -> list[inspect.Parameter]:
    flags = list(inspect.signature(command, eval_str=True).parameters.values())[num_others:]
    return [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in flags]


def _with_flags(
    command: Callable[..., None], run: Callable[..., None], own: list[inspect.Parameter], instead: JobValues
) -> Callable[..., None]:
    """Returns `run` with the name and help of `command` and the flags of both."""
    parameters = [*_job_parameters(instead), *own]

    @functools.wraps(command)
    def flagged(**values: Any) -> None:
        own_values = {each.name: values.pop(each.name) for each in own}
        for name in (each for each in _NOT if values.pop(f"no_{each}", None)):
            if values[name]:
                raise UserError([Problem(f"--no-{name}", f"either this or --{name}", "both")])
            values[name] = False
        run(values | dict(instead), **own_values)

    # Typer reads the signature of a function, then its annotations.
    flagged.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    flagged.__annotations__ = {each.name: each.annotation for each in parameters}
    return flagged


def _resolved(own_values: Mapping[str, Any], results: Any, resolve: Callable[..., ResolvedJob]) -> ResolvedJob:
    """Returns the job, of a checkpoint if the command is to resume one."""
    if (text := own_values.get("resume")) == AUTO:
        return resolve_auto(own_values, resolve)
    if text is not None:
        return resolve_resumed(text, own_values["other_bits"], results, resolve)
    if own_values.get("other_bits"):
        raise UserError([Problem("--other-bits", "--resume with it"), *problems_of(resolve)])
    return resolve()


def resolve_options(
    values: JobValues,
    program_only: bool = False,
    is_plan: bool = False,
    kept: Document | None = None,
    last: Layer | None = None,
    *,
    moves: bool = True,
) -> ResolvedJob:
    """Returns the job of a command's values, its file and the environment; raises UserError with every problem.

    For a plan no code of the user's is imported. `kept` is the job of a checkpoint, `last` has the keywords of a
    call in Python. With `moves` a new job moves stages by itself.
    """
    # The YAML reader takes 20 ms to import: too slow for --help.
    from engine.files.jobs.job_file import resolve_job
    from engine.harness.job_checks import named, offered, readable

    of_model, args = hugging_face_fields(values.get("hf") or "", values.get("hf_random", False), values)
    flags = flag_texts(values) | of_model
    settings = [*(f"{name}={json.dumps(value)}" for name, value in args.items()), *(values["set"] or ())]
    check = (named if program_only else readable if is_plan else offered).trusting(values["trust_code"])
    _refuse_a_library_name(values["job_file"])
    layers = values["job_file"], os.environ, settings, flags
    resolved = resolve_job(*layers, offered=check, kept=kept, last=last, moves=moves)
    tell_untrusted(resolved.foreign if is_plan else (), check)
    return resolved


def flag_texts(values: JobValues) -> dict[str, str]:
    """Returns the flags that are given, as texts, by field."""
    return {name: _text(name, values[name]) for name in FLAG_FIELDS if values[name] is not None}


def flag_of(name: str) -> str:
    """Returns the flag of a field; a field that is true by default has one that makes it false."""
    return f"--{'no-' if _DEFAULTS[name] is True else ''}{name.replace('_', '-')}"


def _refuse_a_library_name(path: Path | None) -> None:
    """Raises UserError for the name of a shipped scenario or matrix, which has no file in the current folder."""
    from engine.files.jobs.library import library_names, scenario_names

    if path is None or path.exists() or (name := str(path)) not in library_names():
        return
    kind, command = ("a scenario", "inject") if name in scenario_names() else ("a matrix", "matrix")
    raise UserError([Problem("", "a job file", kind, f"run it with: bamboo {command} {name}", name)])


def _text(name: str, value: str | bool) -> str:
    if isinstance(value, str):
        return value
    return str(value if name in _NOT else not _DEFAULTS[name]).lower()


def _job_parameters(without: Collection[str]) -> list[inspect.Parameter]:
    file = typer.Argument(
        metavar="JOB.yaml",
        help="job file (YAML with job fields), or the run.json of a run to repeat",
        show_default=False,
        autocompletion=completion.job_files,
    )
    setting = typer.Option(
        "--set", metavar="FIELD=VALUE", help="Set any field, such as model_args.width=64; repeatable."
    )
    parameters = [_parameter("job_file", Annotated[Path | None, file])]
    for name in (each for each in FLAG_FIELDS if each not in without):
        parameters += [_parameter(name, _flag(name, _DEFAULTS[name]))]
        if name in _NOT:
            option = typer.Option(f"--no-{name}", help=_NOT[name], rich_help_panel="Job")
            parameters += [_parameter(f"no_{name}", Annotated[bool, option], default=False)]
    parameters += [_parameter("set", Annotated[list[str] | None, setting])]
    parameters += [_parameter("hf", HfModel), _parameter("hf_random", HfRandom, default=False)]
    return [*parameters, _parameter("trust_code", TrustCode, default=False)]


def _parameter(name: str, annotation: Any, default: object = None) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _flag(name: str, default: object) -> Any:
    kind, flag = FIELD_TYPES[name], flag_of(name)
    help_text = f"{FIELD_HELP[name]} (default {default})" if default != "" else FIELD_HELP[name]
    if kind is bool:  # the flag sets the opposite of the default; --set sets either
        option = typer.Option(flag, help=OFF[name] if default else FIELD_HELP[name], rich_help_panel="Job")
        return Annotated[bool | None, option]
    choices = get_args(kind) if get_origin(kind) is Literal else ()
    complete = completion.one_of(choices) if choices else completion.FIELDS.get(name)
    metavar = "|".join(choices) or _METAVARS[kind]
    option = typer.Option(flag, metavar=metavar, help=help_text, rich_help_panel="Job", autocompletion=complete)
    return Annotated[str | None, option]
