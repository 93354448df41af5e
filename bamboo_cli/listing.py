"""`bamboo list`: the parts that a job or a scenario can name, and the runs that are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from textwrap import shorten
from typing import Annotated, Any

import typer

from bamboo_cli.echo import echo
from bamboo_cli.report import DEFAULT_RESULTS, Results

EPILOG = "Examples:  bamboo list  |  bamboo list scenarios  |  bamboo list runs --json  |  bamboo list data"
_SCENARIOS = Path("scenarios")  # where `bamboo init` writes them


class Kind(StrEnum):
    """The things that can be listed."""

    SCENARIOS = "scenarios"
    MATRICES = "matrices"
    MODELS = "models"
    DATA = "data"
    SCHEDULES = "schedules"
    OPTIMIZERS = "optimizers"
    LR_SCHEDULES = "lr-schedules"
    RUNS = "runs"


def show_list(
    kind: Annotated[Kind | None, typer.Argument(metavar="KIND", help=f"One of {', '.join(Kind)}.")] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """List runs, or the names a job or scenario can use. Without KIND, show the count of each."""
    kinds = [kind] if kind else list(Kind)
    rows = {each: _rows(each, results) for each in kinds}
    if as_json:
        echo(json.dumps(rows))
    elif kind:
        _print(kind, rows[kind], results)
    else:
        from bamboo_cli.tables import print_table

        counts = [(f"bamboo list {each}", str(len(names)), _ABOUT[each]) for each, names in rows.items()]
        print_table(("command", "count", "about"), (False, True, False), counts, has_head=False)


_ABOUT: Mapping[Kind, str] = {
    Kind.SCENARIOS: "faults to try: bamboo inject --scenario NAME",
    Kind.MATRICES: "many cells of faults: bamboo matrix NAME",
    Kind.MODELS: "built-in models: bamboo run --model NAME",
    Kind.DATA: "built-in data and the samples that they yield: bamboo run --data NAME",
    Kind.SCHEDULES: "pipeline schedules: bamboo run --schedule NAME",
    Kind.OPTIMIZERS: "optimizers: bamboo run --optimizer NAME --set optimizer_args.ARGUMENT=VALUE",
    Kind.LR_SCHEDULES: "learning rates: bamboo run --lr-schedule NAME --set lr_args.ARGUMENT=VALUE",
    Kind.RUNS: "runs that are kept, the newest first: bamboo report NAME",
}


_ALSO: Mapping[Kind, str] = {
    Kind.SCENARIOS: "and every file of yours",
    Kind.MATRICES: "and every file of yours",
    Kind.MODELS: "and package.module:factory of yours",
    Kind.DATA: "and a FILE.txt, a folder of MNIST or CIFAR-10 files, or package.module:factory of yours",
    Kind.OPTIMIZERS: "and package.module:Class of yours",
    Kind.LR_SCHEDULES: "and package.module:function of yours, from the step to a factor, or a class of schedulers",
    Kind.SCHEDULES: "and FILE.csv or package.module:generator of yours; bamboo schedule show --schedule NAME draws one",
}


def _rows(kind: Kind, results: Path) -> list[dict[str, Any]]:
    makers: Mapping[Kind, Callable[[], list[dict[str, Any]]]] = {
        Kind.SCENARIOS: lambda: _files(matrices=False),
        Kind.MATRICES: lambda: _files(matrices=True),
        Kind.MODELS: _models,
        Kind.DATA: _data,
        Kind.SCHEDULES: _schedules,
        Kind.OPTIMIZERS: _optimizers,
        Kind.LR_SCHEDULES: _lr_schedules,
        Kind.RUNS: lambda: _runs(results),
    }
    return makers[kind]()


def _files(*, matrices: bool) -> list[dict[str, Any]]:
    """Returns the scenarios, or the matrices, of the library and of the user's folder."""
    from engine.files.jobs.library import SUFFIX, library

    own = sorted(_SCENARIOS.glob(f"*{SUFFIX}")) if _SCENARIOS.resolve() != library().resolve() else []
    rows = []
    for path in (*sorted(library().glob(f"*{SUFFIX}"), key=lambda file: file.stem), *own):
        about, has_cells = _about(path)
        if has_cells == matrices:
            rows.append({"name": str(path) if path in own else path.stem, "about": about})
    return rows


def _about(path: Path) -> tuple[str, bool]:
    """Returns the purpose of a scenario or matrix in one line, and whether it is a matrix."""
    from engine.core.errors import BambooError
    from engine.files.jobs.job_layers import kind_of
    from engine.files.strict_yaml import read_yaml

    try:
        document = read_yaml(path)
    except BambooError as error:
        return f"cannot be read: {error}", False
    about = document.value.get("about", "") if isinstance(document.value, dict) else "no scenario"
    return " ".join(str(about).split()), kind_of(document) == "matrix"


def _models() -> list[dict[str, Any]]:
    from engine.models.model_registry import MODEL_TEXTS, MODELS

    return [
        {"name": name, "about": MODEL_TEXTS[name], "data": entry.data, "arguments": dict(entry.factory.arguments({}))}
        for name, entry in MODELS.items()
    ]


def _data() -> list[dict[str, Any]]:
    from engine.models.model_registry import DATA, DATA_TEXTS, SAMPLES

    return [
        {
            "name": name,
            "task": task,
            "sample": SAMPLES[name][task],
            "about": DATA_TEXTS[name],
            "arguments": dict(factory.arguments({})),
        }
        for name, tasks in DATA.items()
        for task, factory in tasks.items()
    ]


def _schedules() -> list[dict[str, Any]]:
    from engine.core.program.schedules import SCHEDULES

    rows = []
    for name, schedule in SCHEDULES.items():
        least, most = schedule.stages_per_worker
        about = str(schedule.generate.__doc__).partition("\n")[0].removeprefix("Returns ").rstrip(".")
        about += "; a forward and a backward at once" if schedule.overlaps else ""
        rows.append({"name": name, "stages per worker": str(least) if least == most else f"{least}..", "about": about})
    return rows


def _optimizers() -> list[dict[str, Any]]:
    from engine.core.job.torch_parts import OPTIMIZERS
    from engine.core.job.update_rules import OWN_OPTIMIZERS
    from engine.harness.job_checks import optimizer_arguments

    own = {"adamw": "Adam with decoupled weight decay; the default", "sgd": "descent with momentum"}
    about = own | {name: part.about for name, part in OPTIMIZERS.items()}
    return [
        {
            "name": name,
            "about": about[name],
            "fsdp": "yes" if name in OWN_OPTIMIZERS or OPTIMIZERS[name].shards else "no",
            "arguments": _defaults(optimizer_arguments(name)),
        }
        for name in sorted(about)
    ]


def _lr_schedules() -> list[dict[str, Any]]:
    from engine.core.job.torch_parts import LR_SCHEDULES, SCHEDULES

    own = dict.fromkeys(LR_SCHEDULES, "of bamboo, from the warm-up to the last step")
    about = own | {name: f"{part.cls}: {part.about}" for name, part in SCHEDULES.items()}
    arguments = {
        name: {key: "steps" if key == part.horizon else each.default for key, each in part.arguments.items()}
        for name, part in SCHEDULES.items()
    }
    return [
        {"name": name, "about": about[name], "arguments": _defaults(arguments.get(name, {}))} for name in sorted(about)
    ]


def _defaults(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the default of each argument; three dots for one that must be given."""
    return {name: "..." if value is None else value for name, value in arguments.items()}


def _runs(results: Path) -> list[dict[str, Any]]:
    from dataclasses import asdict

    from engine.harness.run_list import run_rows

    return [asdict(each) for each in run_rows(results)]


def _print(kind: Kind, rows: list[dict[str, Any]], results: Path) -> None:
    from bamboo_cli.tables import print_table

    if not rows:
        echo(f"no {kind} in {str(results)!r}" if kind is Kind.RUNS else f"no {kind}")
        return
    shown = [_shown_run(each) for each in rows] if kind is Kind.RUNS else [_shown(each) for each in rows]
    titles = list(shown[0])
    print_table(titles, [False] * len(titles), [list(each.values()) for each in shown])
    if kind in _ALSO:
        echo(_ALSO[kind])


def _shown(row: Mapping[str, Any]) -> dict[str, str]:
    return {
        title: " ".join(f"{key}={each}" for key, each in value.items()) if isinstance(value, dict) else value
        for title, value in row.items()
    }


def _shown_run(row: Mapping[str, Any]) -> dict[str, str]:
    size = f"{row['pipelines']}x{row['stages']} stages" if row["pipelines"] > 1 else f"{row['stages']} stages"
    size += f" of {row['blocks']} blocks" if row["blocks"] > 1 else ""
    return {
        "run": row["name"],
        "job": f"{row['model']}, {size}" if row["model"] else shorten(row["command"], 60, placeholder=" ..."),
        "outcome": row["outcome"],
        "steps": f"{row['steps']} of {row['num_steps']}" if row["num_steps"] else "",
        "date": row["started"],
        "verdict": row["verdict"],  # last: a pipe gets all of it, and pads the other columns
    }
