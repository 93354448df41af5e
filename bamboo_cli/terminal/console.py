"""Colour and width of the output: decided here for every command.

Rules: no character of a text steers the terminal, and no text is markup. No style is written if NO_COLOR is set, if
TERM is dumb, or if the output is no terminal; FORCE_COLOR allows styles without a terminal. Only a terminal has a
width; other output has lines of any length.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from engine.core.texts import printable

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
