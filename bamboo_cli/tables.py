"""Draws every table of the program on the whole width of the terminal; no number is ever cut.

Rules: a text wraps between words, a title too. If the longest words and numbers of all columns do not fit beside each
other, each row is a block with a line for each cell. A pipe or a file gets one line a row.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from bamboo_cli.echo import echo
from engine.core.texts import printable

# Colour and width of the output: decided here for every command.
#
# Rules: no character of a text steers the terminal, and no text is markup. No style is written if NO_COLOR is set, if
# TERM is dumb, or if the output is no terminal; FORCE_COLOR allows styles without a terminal. Only a terminal has a
# width; other output has lines of any length.


GOOD, BAD, DOUBTFUL, OPEN = "green", "red", "yellow", "blue"
STRONG = "bold"
# Of the result of a check or a cell; of its letter in a grid; of the state of a worker.
RESULT_STYLES = {"passed": GOOD, "failed": BAD, "invalid": DOUBTFUL, "not judged": DOUBTFUL}
LETTER_STYLES = {"P": GOOD, "F": BAD, "I": DOUBTFUL, "-": "bright_black"}
STATE_STYLES = {
    **dict.fromkeys(("dead", "failed", "out", "gone"), f"{STRONG} {BAD}"),
    **dict.fromkeys(("finished", "left"), "dim"),
    "running": GOOD,
    "slow": DOUBTFUL,
}
_ANY_WIDTH = 100_000


class _SafeConsole(Console):
    """A console whose only escape sequences are its own: styles, and moves of the cursor under a live picture."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            is_own = segment.control is not None or segment.text.isprintable()
            yield segment if is_own else Segment(printable(segment.text), segment.style)


def console(*, err: bool = False) -> Console:
    """Returns a console for stdout, or for stderr."""
    return _SafeConsole(
        stderr=err,
        highlight=False,
        markup=False,
        emoji=False,
        color_system=None if os.environ.get("NO_COLOR") else "auto",
        width=None if _stream(err).isatty() else _ANY_WIDTH,
    )


def width_of(*, err: bool = False) -> int | None:
    """Returns the columns of the terminal that stdout, or stderr, is; None for a pipe or a file."""
    return console(err=err).width if _stream(err).isatty() else None


def _stream(err: bool) -> TextIO:
    return sys.stderr if err else sys.stdout


def has_colour(*, err: bool = False) -> bool:
    """Returns whether styles are written to stdout, or to stderr."""
    return console(err=err).color_system is not None


def can_redraw(*, err: bool = False) -> bool:
    """Returns whether a picture on stdout, or stderr, can be drawn anew in place."""
    terminal = console(err=err)
    return _stream(err).isatty() and terminal.is_terminal and not terminal.is_dumb_terminal


def say(*parts: str | tuple[str, str], err: bool = False) -> None:
    """Prints a line of texts and (text, style); on a terminal it wraps between words."""
    console(err=err).print(Text.assemble(*parts))


_GAP = 2
_LONG = 28  # columns: a longer word, such as a path, may be broken

Cell = str | Text


def fitted(
    titles: Sequence[str],
    numeric: Sequence[bool],
    rows: Sequence[Sequence[Cell]],
    width: int | None,
    *,
    has_head: bool = True,
) -> Table:
    """Returns a table for a terminal of `width` columns, or for any width; numeric columns are right-aligned."""
    cells = [[_one_line(cell) for cell in row] for row in rows]
    least, most = [], []
    for place, (title, is_number) in enumerate(zip(titles, numeric, strict=True)):
        column = [row[place] for row in cells]
        longest = max((cell.cell_len for cell in column), default=0)
        word = max((cell_len(word) for cell in column for word in cell.plain.split()), default=0)
        least.append(max([longest if is_number else min(word, _LONG), *map(cell_len, title.split())]))
        most.append(max(longest, cell_len(title)))
    if width is not None:
        room = width - _GAP * (len(titles) - 1)
        if sum(least) > room:
            return _blocks(titles, cells, width)
        most = [min(each, room) for each in most]
        while sum(most) > room:
            widest = max((most[place], place) for place in range(len(most)) if most[place] > least[place])[1]
            most[widest] -= 1
    table = Table(box=None, pad_edge=False, header_style=STRONG, show_header=has_head)
    for title, is_number, columns in zip(titles, numeric, most, strict=True):
        table.add_column(title, justify="right" if is_number else "left", width=columns, overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def print_table(
    titles: Sequence[str],
    numeric: Sequence[bool],
    rows: Sequence[Sequence[Cell]],
    *,
    has_head: bool = True,
    err: bool = False,
) -> None:
    """Prints a table to stdout or stderr, fitted to the terminal; nothing if it has no rows."""
    width = width_of(err=err)
    if rows and width is None and not has_colour(err=err):  # a table of actions has a million cells: too many for rich
        for line in _plain_lines(titles, numeric, rows, has_head):
            echo(line, err=err)
    elif rows:
        console(err=err).print(fitted(titles, numeric, rows, width, has_head=has_head))


def _plain_lines(
    titles: Sequence[str], numeric: Sequence[bool], rows: Sequence[Sequence[Cell]], has_head: bool
) -> Iterator[str]:
    table = [[str(cell).replace("\n", " ") for cell in row] for row in rows]
    table[:0] = [list(titles)] if has_head else []
    widths = [max(map(cell_len, column)) for column in zip(*table, strict=True)]
    for row in table:
        spaces = [" " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)]
        cells = [
            f"{pad}{cell}" if number else f"{cell}{pad}" for cell, pad, number in zip(row, spaces, numeric, strict=True)
        ]
        yield (" " * _GAP).join(cells).rstrip()


def _one_line(cell: Cell) -> Text:
    text = cell if isinstance(cell, Text) else Text(cell)
    return Text(" ").join(text.split("\n")) if "\n" in text.plain else text


def _blocks(titles: Sequence[str], cells: Sequence[Sequence[Text]], width: int) -> Table:
    """Returns a line for each filled cell, its title before it, with an empty line between two rows."""
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    label_width = max(map(cell_len, titles))
    table.add_column(width=label_width, style=STRONG)
    table.add_column(width=max(1, width - label_width - _GAP), overflow="fold")
    for number, row in enumerate(cells):
        if number:
            table.add_row()
        for title, cell in zip(titles, row, strict=True):
            if cell.plain:
                table.add_row(title, cell)
    return table
