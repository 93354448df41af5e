"""`bamboo bench NAME`: measures ours and a peer, interleaved in one run."""

from __future__ import annotations

import typer

bench = typer.Typer(no_args_is_help=True, help="Measure bamboo beside its peers, interleaved in one run.")
