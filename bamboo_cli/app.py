"""The program `bamboo`: its commands, and how an error becomes a message and an exit code.

Rule: nothing here, or imported from here at the top, loads torch or pandas; `--help` owes its user 0.2 s.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback
from typing import Annotated, NoReturn

import typer

from bamboo_cli.bench import bench
from bamboo_cli.compare import EPILOG as COMPARE_EPILOG
from bamboo_cli.compare import compare
from bamboo_cli.doctor import doctor
from bamboo_cli.init import EPILOG as INIT_EPILOG
from bamboo_cli.init import init
from bamboo_cli.inject import EPILOG as INJECT_EPILOG
from bamboo_cli.inject import inject
from bamboo_cli.matrix import EPILOG as MATRIX_EPILOG
from bamboo_cli.matrix import matrix
from bamboo_cli.report import EPILOG as REPORT_EPILOG
from bamboo_cli.report import report
from bamboo_cli.run import EPILOG, run
from bamboo_cli.schedule import schedule
from bamboo_cli.schema import EPILOG as SCHEMA_EPILOG
from bamboo_cli.schema import schema
from bamboo_cli.status import status
from bamboo_cli.validate import EPILOG as VALIDATE_EPILOG
from bamboo_cli.validate import validate
from engine.core.errors import BambooError, ExitCode, StorageError

app = typer.Typer(
    name="bamboo",
    no_args_is_help=True,
    invoke_without_command=True,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    help="Train in a pipeline of worker processes, and know what a failure costs before the cloud sends one.",
    epilog="Examples:  bamboo run  |  bamboo run --stages 2 --steps 10 --json  |  bamboo run --dry-run  |  "
    "bamboo schedule show --stages 4  |  bamboo doctor",
)
app.command(epilog=EPILOG)(run)
app.command()(doctor)
app.command()(status)
app.command(epilog=INJECT_EPILOG)(inject)
app.command(epilog=VALIDATE_EPILOG)(validate)
app.command(epilog=SCHEMA_EPILOG)(schema)
app.command(epilog=MATRIX_EPILOG)(matrix)
app.command(epilog=INIT_EPILOG)(init)
app.command(epilog=REPORT_EPILOG)(report)
app.command(epilog=COMPARE_EPILOG)(compare)
app.add_typer(schedule, name="schedule")
app.add_typer(bench, name="bench")


@app.callback()
def _program(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        typer.echo(version_of("bamboo-train"))
        raise typer.Exit


def main() -> NoReturn:
    """Runs the program and exits with its code."""
    _open_standard_streams()
    # Outside a run, Ctrl-C ends the program as the shell expects; a run takes the signal itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        app()
    except BambooError as error:
        _refuse(error)
    except OSError as error:
        # What a run writes goes to one folder; whatever else may fail has been given a name where it happens.
        _refuse(StorageError(f"{error.filename or 'output'}: {error.strerror or error}"))
    except Exception:
        _refuse(BambooError(f"internal error, please report it\n{traceback.format_exc().rstrip()}"))
    sys.exit(ExitCode.OK)


def _open_standard_streams() -> None:
    """Gives a program that was started without standard streams empty ones; else its files would get their numbers."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(fd)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


def _refuse(error: BambooError) -> NoReturn:
    """Says what was wrong: one line per problem on stderr, and one object on stdout for those who asked for JSON."""
    if "--json" in sys.argv:
        refusal = {
            "run_dir": None,
            "outcome": "refused",
            "exit_code": int(error.exit_code),
            "error": str(error).splitlines()[0],
        }
        typer.echo(json.dumps(refusal))
    for line in str(error).splitlines():
        typer.echo(f"bamboo: {line}", err=True)
    sys.exit(int(error.exit_code))
