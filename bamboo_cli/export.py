"""`bamboo export`: the weights of a run, for programs that do not know bamboo."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from bamboo_cli.checkpoint import AsJson, Where
from bamboo_cli.echo import echo
from bamboo_cli.report import DEFAULT_RESULTS, Results
from engine.core.texts import counted

EPILOG = (
    "Examples:  bamboo export latest --output model.safetensors  |  bamboo export latest@39 --output model.pt  |  "
    "bamboo export /data/kept --output folder  |  bamboo export --to dcp --output folder"
)
_MIB = 2**20


def export(
    where: Where = "latest",
    *,
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="FILE|DIR", help="FILE.safetensors, FILE.pt, or a new folder (for shards)."
        ),
    ],
    to: Annotated[
        Literal["auto", "dcp"],
        typer.Option("--to", help="auto: as the output's name says; dcp: a folder for torch.distributed.checkpoint."),
    ] = "auto",
    ema: Annotated[bool, typer.Option("--ema", help="Write the averages of the weights (`bamboo run --ema`).")] = False,
    results: Results = DEFAULT_RESULTS,
    as_json: AsJson = False,
) -> None:
    """Write the weights of a run for other programs: safetensors, torch, a folder of shards, or DCP.

    Tensors have the names of the model's own state_dict. `bamboo run --init` starts from such a file.
    """
    from engine.harness.run_list import export_weights

    summary = export_weights(where, results, output, partial(echo, err=True), for_dcp=to == "dcp", ema=ema)
    if as_json:
        echo(json.dumps(summary))
        return
    size = f"{counted(summary['tensors'], 'tensor')}, {summary['bytes'] / _MIB:.1f} MiB"
    echo(f"{size}, of step {summary['step']} of {summary['run']} in {summary['output']!r}")
