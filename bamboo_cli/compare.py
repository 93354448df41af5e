"""`bamboo compare A B`: the figures of two runs, and those that got slower; or whether their weights are equal."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bamboo_cli.completion import runs
from bamboo_cli.echo import echo
from bamboo_cli.report import DEFAULT_RESULTS, Results, load_run
from bamboo_cli.report_parts import is_foreign, located, refuse_unreadable
from engine.core.errors import ExitCode

if TYPE_CHECKING:
    from engine.files.run_folder import RunFolder

EPILOG = (
    "Examples:  bamboo compare 20261121-1200 latest  |  bamboo compare old/run new/run --json  |  "
    "bamboo compare --weights 20261121-1200 latest  |  bamboo compare --weights latest@39 model.safetensors"
)


def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="Baseline run: its name, the start of its name, or its folder. With --weights also a checkpoint "
            "(RUN, DIR or URL, with @STEP) or FILE.safetensors.",
            autocompletion=runs,
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="Run to compare with it.", autocompletion=runs)],
    *,
    weights: Annotated[
        bool,
        typer.Option(
            "--weights", help="Compare the weights bit for bit instead of the times; exit with 1 if they differ."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    results: Results = DEFAULT_RESULTS,
) -> None:
    """Compare two runs: quantiles in ms, ratios of the medians (B / A), and the figures that got slower.

    Differing job fields and runs that did not pass are printed first, because the figures may not be comparable.

    With --weights: the number of equal hashes, and the first difference by step, layer, tensor and element.
    """
    if weights:
        _compare_weights(a, b, results, as_json)
        return
    from bamboo_cli.tables import BAD, DOUBTFUL, STRONG, print_table, say
    from engine.report.compare import compare_figures
    from engine.report.formats import as_text, for_terminal

    figures, fields, wrong = _compared([located(results, run) for run in (a, b)])
    table = compare_figures(*figures)
    if as_json:
        summary = {"different_fields": fields, "not_passed": wrong, "figures": json.loads(as_text(table, "json"))}
        echo(json.dumps(summary))
        return
    if fields:
        differences = "; ".join(f"{name} {_text(ours)} and {_text(theirs)}" for name, (ours, theirs) in fields.items())
        say((f"The jobs differ: {differences}.", f"{STRONG} {DOUBTFUL}"))
    for letter, why in wrong.items():
        say((f"{letter}: {why}", f"{STRONG} {BAD}"))
    slower = ", ".join(table[table["verdict"] == "slower"]["figure"])
    say((f"B is slower in: {slower}" if slower else "Nothing got slower.", STRONG))
    print_table(*for_terminal(table))


def _compared(folders: Sequence[RunFolder]) -> tuple[list[Any], dict[str, tuple[Any, Any]], dict[str, str]]:
    """Returns the figures of two runs, the fields in which their jobs differ, and by letter why one has not passed."""
    from bamboo_cli.report_external import loaded as loaded_external
    from engine.report.compare import different_fields, different_values, figures_of, judge_run

    if any(map(is_foreign, folders)):
        (one, of_a), (other, of_b) = map(loaded_external, folders)
        whys = [of_a.code[1], of_b.code[1]]
        figures, fields = [of_a.figures, of_b.figures], different_values(one.job, other.job)
    else:
        a, b = (load_run(refuse_unreadable(folder)) for folder in folders)
        figures, fields = [figures_of(a), figures_of(b)], different_fields(a.job, b.job)
        whys = [judge_run(a)[1], judge_run(b)[1]]
    return figures, fields, {letter: why for letter, why in zip("AB", whys, strict=True) if why}


def _compare_weights(a: str, b: str, results: Path, as_json: bool) -> None:
    from engine.files.jobs.named_weights import compare_weights, named_weights

    comparison = compare_weights(named_weights(a, results), named_weights(b, results))
    code = ExitCode.OK if comparison.is_equal else ExitCode.EXPECTATION_FAILED
    if as_json:
        echo(json.dumps({**comparison.as_dict(), "exit_code": int(code)}))
    else:
        echo("\n".join(comparison.lines()))
    if code:
        raise typer.Exit(code)


def _text(value: object) -> str:
    return "unset" if value is None or value == "" else str(value)
