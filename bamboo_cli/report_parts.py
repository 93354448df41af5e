"""What `bamboo report` does for every run: its run, its forms of a table, its page, its conditions."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING

from bamboo_cli.echo import echo
from engine.core.errors import ExitCode, NothingMatchedError, StorageError, required
from engine.files.atomic_write import write_atomically, write_named

if TYPE_CHECKING:
    from engine.files.run_folder import RunFolder
    from engine.report.formats import DataTable

# Exit code of a condition -> its word; the first of these codes that occurs is the exit code of all conditions.
WORST = (ExitCode.OK, ExitCode.NOTHING_MATCHED, ExitCode.EXPECTATION_FAILED)
_SAID = {ExitCode.EXPECTATION_FAILED: "failed", ExitCode.NOTHING_MATCHED: "not judged", ExitCode.OK: "ok"}


class Table(StrEnum):
    """The tables of a run."""

    RECOVERY = "recovery"
    STEPS = "steps"
    WORKERS = "workers"
    ACTIONS = "actions"
    CHECKS = "checks"
    OUTCOME = "outcome"
    SAMPLES = "samples"
    EVALUATIONS = "evaluations"
    NORMS = "norms"
    MEMORY = "memory"
    TENSORS = "tensors"
    TIME = "time"
    STAGES = "stages"
    EDGES = "edges"


class Format(StrEnum):
    """The forms of a table."""

    TERMINAL = "terminal"
    CSV = "csv"
    JSON = "json"
    MARKDOWN = "markdown"
    HTML = "html"
    PARQUET = "parquet"


def located(results: Path, run: str | None) -> RunFolder:
    """Returns a run as `find` does, or one of another launcher (``external/NAME``); raises NothingMatchedError."""
    from engine.files.jobs.library import EXTERNAL_FOLDER
    from engine.files.run_folder import LATEST, find_run, run_names

    external, name = results / EXTERNAL_FOLDER, run or LATEST
    if Path(name).is_dir():
        return find_run(results, name)
    if name.startswith(f"{EXTERNAL_FOLDER}/"):
        return find_run(external, name.partition("/")[2])
    there = [any(name in (LATEST, each[: len(name)]) for each in run_names(folder)) for folder in (results, external)]
    return find_run(external if there == [False, True] else results, run)


def is_foreign(folder: RunFolder) -> bool:
    """Returns whether a run is that of another launcher's job."""
    from engine.files.external_runs import external_facts
    from engine.files.jobs.library import EXTERNAL_FOLDER

    if folder.path.parent.name == EXTERNAL_FOLDER:
        return True
    try:
        return bool(external_facts(folder))
    except StorageError:
        return False


def refuse_unreadable(folder: RunFolder) -> RunFolder:
    """Returns a folder; raises NothingMatchedError for the folder of a matrix, and for one without events."""
    from engine.files.matrix_results import RESULTS

    if (folder.path / RESULTS).is_file():
        text = f"{str(folder.path)!r} is the folder of a matrix: its page is {folder.path / 'report.html'}"
        runs = shlex.quote(str(folder.path / "runs"))
        raise NothingMatchedError(text, f"one of the runs that it kept: bamboo report RUN --results {runs}")
    if not folder.events.is_file():
        raise NothingMatchedError(f"no run to report in {str(folder.path)!r}: there is no {folder.events.name}")
    return folder


def write_frame(frame: DataTable, form: Format, output: Path | None) -> None:
    """Writes a table for programs, to a file or to stdout."""
    from engine.report.formats import as_parquet, as_text

    if form is Format.PARQUET:
        write_named(required(output, "parquet goes to a file"), as_parquet(frame))
    elif output is None:
        echo(as_text(frame, form), nl=False)
    else:
        write_named(output, as_text(frame, Format.CSV if form is Format.TERMINAL else form))


def write_page(folder: RunFolder, page: Callable[[], str], *, named: Path | None, is_opened: bool) -> None:
    """Writes the page of a run to the file that the user named, else into the run's folder if it is the user's own."""
    path = named or folder.path / "report.html"
    if named is None and not folder.is_own:
        text = f"no page: {str(folder.path)!r} belongs to another user (write it elsewhere: --page FILE)"
        echo(text, err=True)
        return
    (write_named if named else write_atomically)(path, page())
    echo(str(path), err=True)
    if is_opened:
        _open(path)


def _open(path: Path) -> None:
    """Opens a page in the user's browser; without one it says so. The command goes on in either case."""
    import webbrowser

    # A browser in the terminal cannot show the page, which is drawn by a script.
    has_browser = any(os.environ.get(name) for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"))
    if not (has_browser and webbrowser.open(path.resolve().as_uri())):
        echo("no browser can be started here; open this file in one (or set BROWSER)", err=True)


def judge_conditions(
    tables: Mapping[str, DataTable], of_runs: Iterable[tuple[ExitCode, str]], texts: Sequence[str]
) -> ExitCode:
    """Prints the outcome of each condition, and why a run has not passed; returns the exit code of all."""
    from engine.report.compare import parse_condition

    conditions = [parse_condition(text, tables) for text in texts]
    judged = [each.judge(tables) for each in conditions]
    judged = [*filter(itemgetter(1), of_runs), *judged] if texts else []
    for code, text in judged:
        echo(f"{_SAID[code]}: {text}", err=True)
    codes = {ExitCode.OK, *(code for code, _ in judged)}
    return next(code for code in _SAID if code in codes)
