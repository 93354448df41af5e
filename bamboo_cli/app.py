"""The program `bamboo`: its commands, and the message and exit code of each error.

Rules: a command's module is imported when the command is called. `--help` must answer within 0.2 s, so it uses only the
texts in this module.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from importlib import import_module
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from bamboo_cli.echo import echo
from engine.core.errors import BambooError, ExitCode, Problem, UserError
from engine.core.texts import printable

# Name of a command, of its module, and of the function or group in that module -> the beginning of its help.
COMMANDS = {
    "run": "Train a model in a pipeline of worker processes.",
    "predict": "Run a trained model over samples, forwards only, and write its merged outputs to a file.",
    "doctor": "Check this machine: one line per check, with the fix.",
    "agent": "Train on several hosts, with one agent on each; or add a worker to a running job.",
    "launch": "Print the files that start a run on several hosts with Slurm, Kubernetes, Ray or ssh.",
    "status": "Show the stage owners, step, heartbeats and verdicts of a run, from its etcd or else from its events.",
    "inject": "Run a scenario (job, faults and fault-free twin), then check its expectations.",
    "learn": "Write a scenario from the logs of a real failure, citing the log lines as comments.",
    "validate": "Check scenario, matrix and job files: valid fields, faults that can strike, victims that exist.",
    "schema": "Print the JSON schema of scenario, matrix or job files.",
    "matrix": "Run every cell of a scenario matrix.",
    "init": "Write a starter job, scenario and matrix; with --ci also a workflow.",
    "report": "Report on a run: tables, a self-contained page, a trace.",
    "collect": "Merge the records of all hosts of a run into RUN/collected, on one clock and in causal order.",
    "compare": "Compare two runs: quantiles in ms, ratios of the medians (B / A), and the figures that got slower.",
    "export": "Write the weights of a run for other programs: safetensors, torch, a folder of shards, or DCP.",
    "schedule": "Show, check or export a job's program; compare or search schedules; switch that of a live run.",
    "checkpoint": "List the checkpoints of a run, verify every byte, delete old ones.",
    "list": "List runs, or the names a job or scenario can use.",
    "clean": "Delete the files that killed runs left behind: etcd data, temporary files, twins that no run can reuse.",
    "bench": "Measure bamboo and its peers, interleaved in one run.",
}
# Name of a command -> its module and function, where they have other names.
_PLACES = {
    "list": ("listing", "show_list"),
    "clean": ("clean", "clean"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "export": ("export", "export"),
    "agent": ("agent", "agent"),
    "collect": ("collect", "collect"),
    "launch": ("launch", "launch"),
}


class _Group(TyperGroup):
    """A group of commands whose own flags have False as default: for None Typer imports pydantic, which is slow."""

    def get_params(self, ctx: Any) -> Any:
        """Returns the options of the group."""
        params = super().get_params(ctx)
        for each in params:
            each.default = False if each.default is None else each.default
        return params


class _Commands(_Group):
    """All commands by name; a called command replaces the placeholder with its name."""

    def __init__(self, **settings: Any):
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=text) for name, text in COMMANDS.items()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Returns the command that `args` call, with its module imported."""
        if args and args[0] in COMMANDS:
            self.commands[args[0]] = load(args[0])
            if ctx.resilient_parsing:  # a shell completes this line
                _take_any_value(self.commands[args[0]])
        return super().resolve_command(ctx, args)

    def make_context(self, *words: Any, **settings: Any) -> Any:
        """Returns the context of a command line; no character of a message about it steers a terminal."""
        with _readable_messages():
            return super().make_context(*words, **settings)

    def invoke(self, ctx: Any) -> Any:
        """Calls the command; no character of a message about its arguments steers a terminal."""
        with _readable_messages():
            return super().invoke(ctx)


@contextmanager
def _readable_messages() -> Iterator[None]:
    """Makes a message of Typer printable, without the words of the library that checks values."""
    try:
        yield
    except Exception as error:
        if isinstance(message := getattr(error, "message", None), str):
            error.message = printable(message.removeprefix("Value error, "))  # type: ignore[attr-defined]
        if hasattr(error, "possibilities"):
            error.possibilities = _as_field(error) or error.possibilities
        raise


def _as_field(unknown: Any) -> list[str]:
    """Returns how the value of an unknown option is given, if its name is a field of a job that --set takes."""
    from engine.core.job.job import Job

    name = unknown.option_name.lstrip("-").replace("-", "_")
    takes_fields = any("--set" in each.opts for each in unknown.ctx.command.params)
    return [f"--set {name}=VALUE"] if takes_fields and name in {each.name for each in fields(Job)} else []


def load(name: str) -> Any:
    """Returns the command, or group of commands, of this name, with its module imported."""
    place, function = _PLACES.get(name, (name, name))
    module = import_module(f"bamboo_cli.{place}")
    command = getattr(module, function)
    loader = typer.Typer(add_completion=False)
    if isinstance(command, typer.Typer):
        loader.add_typer(command, name=name, cls=_Group)
    else:
        loader.command(name, epilog=getattr(module, "EPILOG", None))(command)
    return get_group(loader).commands[name]


def _take_any_value(command: Any) -> None:
    """Makes a command take values without a check, for which Typer imports pydantic: too slow for completion."""
    own = command.get_params

    def params_of(ctx: Any) -> Any:
        params = own(ctx)  # with --help, which is not among the parameters of the command
        for each in params:
            each.process_value = lambda ctx, value: value
        return params

    command.get_params = params_of
    for each in getattr(command, "commands", {}).values():
        _take_any_value(each)


app = typer.Typer(
    name="bamboo",
    cls=_Commands,
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Pipeline-parallel training that survives the death of its workers, bit for bit.",
    epilog="Examples:  bamboo run  |  bamboo run --stages 2 --steps 10 --json  |  bamboo run --dry-run  |  "
    "bamboo schedule show --stages 4  |  bamboo doctor",
)


@app.callback()
def _program(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        echo(version_of("bamboo-train"))
        raise typer.Exit


def main() -> NoReturn:
    """Runs the program and exits with its code; if the reader of its output is gone, with the code of SIGPIPE."""
    _open_standard_streams()
    try:
        _run_program()
    except BrokenPipeError:
        _end_unheard()
    except SystemExit as end:
        if isinstance(end.__context__, BrokenPipeError):  # the printing libraries exit with 1
            _end_unheard()
        raise


def _run_program() -> NoReturn:
    try:
        app()
    except SystemExit as end:
        # Typer has printed the error in the arguments to stderr.
        message = getattr(end.__context__, "format_message", None)
        if message is not None:
            _tell_programs(str(message()), end.code)
        raise
    except BambooError as error:
        _refuse(error)
    except BrokenPipeError:
        raise
    except OSError as error:
        from engine.files.atomic_write import of_system

        _refuse(of_system(error))
    except Exception:
        import traceback

        _refuse(BambooError(f"internal error, please report it\n{traceback.format_exc().rstrip()}"))
    sys.exit(ExitCode.OK)


def _end_unheard() -> NoReturn:
    """Exits as if killed by SIGPIPE; the signal itself is ignored, because a run must survive its reader."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):  # Python flushes them at exit
        os.dup2(nowhere, stream)
    sys.exit(ExitCode.UNHEARD)


def _open_standard_streams() -> None:
    """Opens missing standard streams on the null device; else files of the program would get their descriptors."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _refuse(error: BambooError) -> NoReturn:
    """Exits with the code of an error: one line per problem on stderr; with --json also one object on stdout."""
    _tell_programs(str(error), int(error.exit_code), error.problems if isinstance(error, UserError) else ())
    for line in str(error).splitlines():
        echo(f"bamboo: {line}", err=True)
    sys.exit(int(error.exit_code))


def _tell_programs(text: str, code: object, problems: Iterable[Problem] = ()) -> None:
    """Prints one object to stdout if the user gave --json."""
    if asks_for_json(sys.argv[1:]):
        refusal = {"run_dir": None, "outcome": "refused", "exit_code": code, "error": text.partition("\n")[0]}
        echo(json.dumps(refusal | {"problems": [asdict(each) for each in problems]}))


def asks_for_json(words: Sequence[str]) -> bool:
    """Returns whether a command line has the flag ``--json``; as the value of an option it is none."""
    if "--json" not in words or words[0] not in COMMANDS:
        return "--json" in words
    command, left = load(words[0]), iter(words[1:])
    for word in left:
        if word in ("--", "--json"):
            return word == "--json"
        if word in getattr(command, "commands", ()):
            command = command.commands[word]
        elif any(word in each.opts and not getattr(each, "is_flag", False) for each in command.params):
            next(left, None)
    return False
