"""The options of `bamboo matrix`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from bamboo_cli.options.completion import library_files

DEFAULT_RESULTS = Path("results")
_PANEL = "Which cells"

File = Annotated[
    str,
    typer.Argument(
        metavar="FILE",
        help="a matrix or scenario file, or a name from the library",
        show_default=False,
        autocompletion=library_files,
    ),
]
Shard = Annotated[str, typer.Option("--shard", metavar="K/N", help="Only part K of N.", rich_help_panel=_PANEL)]
CellText = Annotated[
    str, typer.Option("--cell", metavar="TEXT", help="Only cells with this in their name.", rich_help_panel=_PANEL)
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the newest run: skip cells that passed.", rich_help_panel=_PANEL)
]
Times = Annotated[
    list[Path] | None,
    typer.Option("--times", help="Earlier results.jsonl by which shards are balanced.", rich_help_panel=_PANEL),
]
Form = Annotated[
    Literal["text", "list", "github"],
    typer.Option("--format", help="text: run; list: only print cells; github: only print a workflow matrix."),
]
NumShards = Annotated[int, typer.Option("--shards", help="Shards of --format github.", min=1)]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="FIELD=VALUE", help="Another value for a field of every job.")
]
Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Cells side by side; 0: one per core.", min=0)]
Limit = Annotated[float, typer.Option("--limit", help="Seconds after which a cell has hung.", min=1.0)]
Shrink = Annotated[bool, typer.Option("--shrink", help="Shrink the first cell that fails.")]
Budget = Annotated[int, typer.Option("--shrink-tries", help="Runs that shrinking may take.", min=1)]
Junit = Annotated[Path | None, typer.Option("--junit", metavar="FILE", help="Write JUnit XML.")]
Page = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the page here, not to its folder.")]
Keep = Annotated[bool, typer.Option("--keep", help="Keep the run folders of cells that passed.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Results = Annotated[Path, typer.Option(help="Folder that receives matrices/TIME-NAME-HEX/.")]
