"""The options of `bamboo matrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bamboo_cli.completion import library_files

DEFAULT_RESULTS = Path("results")
_PANEL = "Which cells"

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="a shipped matrix or scenario, or a file",
        show_default=False,
        autocompletion=library_files,
    ),
]
Shard = Annotated[str, typer.Option("--shard", metavar="K/N", help="Run only part K of N.", rich_help_panel=_PANEL)]
CellText = Annotated[
    str, typer.Option("--cell", metavar="TEXT", help="Run only cells whose name contains this.", rich_help_panel=_PANEL)
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Resume the newest run: skip cells that passed.", rich_help_panel=_PANEL)
]
Times = Annotated[
    list[Path] | None,
    typer.Option("--times", help="Earlier results.jsonl, to balance the shards by duration.", rich_help_panel=_PANEL),
]
Form = Annotated[
    Literal["text", "list", "github"],
    typer.Option("--format", help="text: run the cells; list: only print them; github: only print a workflow matrix."),
]
NumShards = Annotated[int, typer.Option("--shards", help="Number of shards for --format github.", min=1)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Override a field of every job; repeatable.")
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Cells to run in parallel; 0: one per core.", min=0)]
Limit = Annotated[float, typer.Option("--limit", help="Seconds after which a cell counts as hung.", min=1.0)]
Shrink = Annotated[bool, typer.Option("--shrink", help="Reduce the first failing cell to a smaller one.")]
Budget = Annotated[int, typer.Option("--shrink-tries", help="Maximum number of runs for --shrink.", min=1)]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write a JUnit XML file.")]
Page = Annotated[
    Path | None,
    typer.Option("--html", metavar="FILE", help="Write the page to this file instead of the matrix folder."),
]
Keep = Annotated[bool, typer.Option("--keep", help="Also keep the run folders of cells that passed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Results = Annotated[Path, typer.Option(help="Folder in which matrices/TIME-NAME-HEX/ is created.")]
