"""`bamboo learn`: writes a scenario from the logs of a real failure."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from bamboo_cli.echo import echo
from engine.core.texts import counted

EPILOG = (
    "Examples:  bamboo learn train.log  |  bamboo learn nccl_trace_rank_*  |  "
    "bamboo learn results/latest/events.jsonl --output again.yaml"
)


def learn(
    logs: Annotated[
        list[Path],
        typer.Argument(
            metavar="LOG...",
            help="Output of torchrun or srun, error.json, events of Kubernetes, dumps of NCCL's flight recorder, or "
            "events.jsonl of a run.",
            exists=True,
            dir_okay=False,
        ),
    ],
    *,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Write the scenario to this new file.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a scenario from the logs of a real failure, citing the log lines as comments.

    The scenario asks about anything that the logs leave open; answer its questions before you run it.
    """
    from engine.external.learn import learn as learned
    from engine.files.atomic_write import create_file

    scenario = learned(logs)
    if output is not None:
        create_file(output, output.parent, scenario.text)
    if as_json:
        echo(json.dumps({"scenario": scenario.text, "questions": scenario.questions}))
    elif output is None:
        echo(scenario.text, nl=False)
    else:
        open_questions = (
            f"answer {counted(scenario.questions, 'question')} in {output}, then " if scenario.questions else ""
        )
        echo(f"next: {open_questions}bamboo inject {output}")
