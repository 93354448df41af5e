"""The values that shells complete: names of the library, of built-in parts and of runs, and the user's YAML files.

Rules: a shell waits for the answer at every press of a key, so each function imports only a table of names. A shell
prints the values, so none has a character that steers a terminal.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

_JOB_FILES = (".yaml", ".yml", ".json")


def scenarios(incomplete: str) -> list[str]:
    """Returns the scenarios that begin so: bare names of the library, and files."""
    from engine.files.jobs.library import scenario_names

    return _beginning(incomplete, [*scenario_names(), *_files(incomplete)])


def library_files(incomplete: str) -> list[str]:
    """Returns the scenarios and matrices that begin so: bare names of the library, and files."""
    from engine.files.jobs.library import library_names

    return _beginning(incomplete, [*library_names(), *_files(incomplete)])


def job_files(incomplete: str) -> list[str]:
    """Returns the YAML and JSON files that begin so."""
    return _beginning(incomplete, _files(incomplete))


def runs(ctx: typer.Context, incomplete: str) -> list[str]:
    """Returns the runs that begin so, the newest first, in the folder of results that the command line gives."""
    from engine.files.run_folder import LATEST, run_names

    results = Path(ctx.params.get("results") or os.environ.get("BAMBOO_RESULTS") or "results")
    names = run_names(results)
    return _beginning(incomplete, [*([LATEST] if names else []), *reversed(names)])


def models(incomplete: str) -> list[str]:
    """Returns the built-in models that begin so."""
    from engine.models.model_registry import MODELS

    return _beginning(incomplete, MODELS)


def data(incomplete: str) -> list[str]:
    """Returns the built-in data that begin so, and text files."""
    from engine.models.model_registry import DATA

    return _beginning(incomplete, ["auto", *DATA, *_files(incomplete, (".txt",))])


def schedules(incomplete: str) -> list[str]:
    """Returns the built-in schedules that begin so, and CSV files."""
    from engine.core.program.schedules import SCHEDULES

    return _beginning(incomplete, [*SCHEDULES, *_files(incomplete, (".csv",))])


def one_of(values: Sequence[str]) -> Callable[[str], list[str]]:
    """Returns the completion of a field that has one of these values."""

    def complete(incomplete: str) -> list[str]:
        return _beginning(incomplete, values)

    return complete


def optimizers(incomplete: str) -> list[str]:
    """Returns the optimizers that begin so."""
    from engine.core.job.torch_parts import OPTIMIZERS
    from engine.core.job.update_rules import OWN_OPTIMIZERS

    return _beginning(incomplete, sorted((*OWN_OPTIMIZERS, *OPTIMIZERS)))


def rates(incomplete: str) -> list[str]:
    """Returns the schedules of the learning rate that begin so."""
    from engine.core.job.torch_parts import LR_SCHEDULES, SCHEDULES

    return _beginning(incomplete, sorted((*LR_SCHEDULES, *SCHEDULES)))


# Field of a job -> the completion of its value, where the values are not in its type.
FIELDS: dict[str, Callable[[str], list[str]]] = {
    **{"model": models, "data": data, "schedule": schedules, "optimizer": optimizers, "lr_schedule": rates}
}


def _beginning(incomplete: str, values: Iterable[str]) -> list[str]:
    return [each for each in values if each.startswith(incomplete) and each.isprintable()]


def _files(incomplete: str, suffixes: Sequence[str] = _JOB_FILES) -> list[str]:
    """Returns the files of a kind in the folder of an incomplete path, and its folders with a slash."""
    folder = os.path.dirname(incomplete)
    try:
        entries = sorted(os.scandir(folder or "."), key=lambda entry: entry.name)
    except OSError:
        return []
    hidden = os.path.basename(incomplete).startswith(".")
    shown = [each for each in entries if hidden or not each.name.startswith(".")]
    files = [each.name for each in shown if each.name.endswith(tuple(suffixes)) and each.is_file()]
    folders = [f"{each.name}/" for each in shown if each.is_dir()] if incomplete else []
    return [os.path.join(folder, name) for name in (*files, *folders)]
