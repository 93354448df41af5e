"""Draws every table of the program: the columns that fit the terminal, or one block a row; no number is ever cut.

Rules: a text wraps between words, a long path also after a slash. A column without enough room for its longest word or
number is left out, in the order of `FIRST_TO_GO`, and a line below the table names it. A table is drawn in blocks if it
has one row and not all of its columns fit, or if a column that is never left out does not fit. A pipe or a file gets
every column, and one line a row.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from bamboo_cli.terminal.echo import echo
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
        for each in super().render(renderable, options):
            is_own = each.control is not None or each.text.isprintable()
            yield each if is_own else Segment(printable(each.text), each.style)


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
    found = console(err=err)
    return _stream(err).isatty() and found.is_terminal and not found.is_dumb_terminal


def say(*parts: str | tuple[str, str], err: bool = False) -> None:
    """Prints a line of texts and (text, style); on a terminal it wraps between words."""
    console(err=err).print(Text.assemble(*parts))


# Titles of columns that may be left out, the least important first. All others are keys and main figures.
FIRST_TO_GO = (
    *("rung", "redone actions", "plan ms", "inventory ms", "agree ms", "fence ms", "regroup ms", "heirs"),
    *("replay ms", "pause ms", "detect ms"),
    *("epoch", "commit ms", "grad norm", "validation loss", "validation metric", "samples/s"),
    *("tensors MiB", "code", "peak stash", "actions", "pid", "end ms", "last action"),
    *("reserved MiB", "device predicted MiB", "peak memory MiB", "device MiB", "busy ms", "slots"),
    *("date", "job", "microbatches/s"),
    *("stages before", "blocks before"),
    *("kind", "pipeline", "op", "stage", "microbatch", "redundant", "replayed", "end ns", "start ns"),
    *("A n", "B n", "A p95 ms", "B p95 ms", "n", "goal", "ratio"),
    *("placement", "V", "sends", "stash", "over ideal"),
    "arguments",
)
_GAP = 2
_WORDS, _PATH_PARTS = re.compile(r"\S+"), re.compile(r"[^/]*/|[^/]+")
_USUAL_LINES = 3  # of a text in a table
_SHORT, _LONG = 20, 28  # columns: a shorter text is not wrapped; a longer text needs no wider column

Cell = str | Text


@dataclass(frozen=True, slots=True)
class _Column:
    """A column of texts, with the fewest columns of the terminal that it can be drawn in, and the most it can use."""

    title: str
    is_number: bool
    cells: tuple[Text, ...]
    least: int
    most: int


def fitted(
    titles: Sequence[str],
    numeric: Sequence[bool],
    rows: Sequence[Sequence[Cell]],
    width: int | None,
    *,
    has_head: bool = True,
    remedy: str = "A wider terminal shows them, and so does a pipe into less -S.",
) -> RenderableType:
    """Returns a table for a terminal of `width` columns, or for any width; numeric columns are right-aligned.

    `remedy` says how to see the columns that are left out.
    """
    cells = [[_one_line(cell) for cell in row] for row in rows]
    columns = [
        _column(title, is_number, tuple(row[place] for row in cells))
        for place, (title, is_number) in enumerate(zip(titles, numeric, strict=True))
    ]
    shown = columns if width is None else _shown(columns, width)
    left_out = [each.title for each in columns if each not in shown]
    if width is not None and (not _fits(shown, width) or (left_out and len(rows) == 1)):
        return _blocks(columns, len(rows), width)
    table = _drawn(shown, [each.most for each in shown] if width is None else _widths(shown, width))
    table.show_header = has_head
    note = Text(f"left out: {', '.join(left_out)}. {remedy}", style="dim")
    return Group(table, note) if left_out else table


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


def _column(title: str, is_number: bool, cells: tuple[Text, ...]) -> _Column:
    longest = max((each.cell_len for each in cells), default=0)
    word = max((cell_len(part) for each in cells for word in each.plain.split() for part in _parts(word)), default=0)
    least = longest if is_number else max(word, min(longest, max(_SHORT, min(_LONG, -(-longest // _USUAL_LINES)))))
    return _Column(
        title,
        is_number,
        cells,
        max([least, *map(cell_len, title.split())]),
        max(longest, cell_len(title)),
    )


def _parts(word: str) -> list[str]:
    """Returns the parts between which a word may be broken: those of a long path."""
    return _PATH_PARTS.findall(word) if cell_len(word) > _LONG else [word]


def _broken(text: Text, width: int) -> Text:
    """Returns a text with line breaks in the paths that are longer than `width`."""
    places = []
    for word in _WORDS.finditer(text.plain):
        length, place = 0, word.start()
        for part in _parts(word.group()) if cell_len(word.group()) > width else ():
            if length and length + cell_len(part) > width:
                places.append(place)
                length = 0
            length, place = length + cell_len(part), place + len(part)
    return Text("\n").join(text.divide(places)) if places else text


def _fits(columns: Sequence[_Column], width: int) -> bool:
    return sum(each.least + _GAP for each in columns) - _GAP <= width


def _shown(columns: Sequence[_Column], width: int) -> list[_Column]:
    """Returns the columns without those that must go; they may still not fit, if none of them may be left out."""
    shown = list(columns)
    for title in FIRST_TO_GO:
        if not _fits(shown, width):
            shown = [each for each in shown if each.title != title]
    return shown


def _widths(columns: Sequence[_Column], width: int) -> list[int]:
    """Returns the width of each column; texts take the room that is left, then titles do."""
    widths = [each.least for each in columns]
    spare = width - sum(widths) - _GAP * (len(columns) - 1)
    for place in sorted(range(len(columns)), key=lambda place: columns[place].is_number):
        more = min(spare, columns[place].most - widths[place])
        widths[place] += more
        spare -= more
    return widths


def _drawn(columns: Sequence[_Column], widths: Sequence[int]) -> Table:
    table = Table(box=None, pad_edge=False, header_style=STRONG)
    for column, width in zip(columns, widths, strict=True):
        table.add_column(column.title, justify="right" if column.is_number else "left", width=width, overflow="fold")
    for row in zip(*(each.cells for each in columns), strict=True):
        table.add_row(*(_broken(cell, width) for cell, width in zip(row, widths, strict=True)))
    return table


def _blocks(columns: Sequence[_Column], num_rows: int, width: int) -> Table:
    """Returns a line for each filled cell, its title before it, with an empty line between two rows."""
    table = Table.grid(padding=(0, _GAP, 0, 0), pad_edge=False)
    label_width = max(cell_len(each.title) for each in columns)
    table.add_column(width=label_width, style=STRONG)
    room = max(1, width - label_width - _GAP)
    table.add_column(width=room, overflow="fold")
    for row in range(num_rows):
        if row:
            table.add_row()
        for column in columns:
            if column.cells[row].plain:
                table.add_row(column.title, _broken(column.cells[row], room))
    return table
