"""Prints text of any origin, line by line: the border between bamboo and a terminal that has no style.

Rules: every text that a command prints passes here, or through `bamboo_cli/tables.py` if it has styles. Both
take out the characters that steer a terminal, for a pipe too: its reader may be a terminal.
"""

from __future__ import annotations

import typer

from engine.core.texts import printable


def echo(text: str, *, err: bool = False, nl: bool = True) -> None:
    """Prints a text to stdout or stderr, with a newline unless `nl` is false; none of its characters steers a terminal.

    Raises OSError if the stream takes no text.
    """
    typer.echo(printable(text), err=err, nl=nl)
