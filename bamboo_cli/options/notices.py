"""The options of `bamboo run` that ask a command or a URL for notices."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from typing import Annotated

import typer

from engine.core.agent.notice_answer import NoticeFrom
from engine.core.duration import DURATION_FORM, parse_duration
from engine.core.errors import Problem, UserError

_PANEL = "Failures"
_LEAST_NS = 100_000_000
NoticeCommand = Annotated[
    str,
    typer.Option(
        "--notice-command",
        metavar="COMMAND",
        help="Ask this command for notices: what it prints with exit code 0, worker numbers or any text, is one.",
        rich_help_panel=_PANEL,
    ),
]
NoticeUrl = Annotated[
    str,
    typer.Option(
        "--notice-url",
        metavar="URL",
        help="Ask this URL for notices, such as http://169.254.169.254/latest/meta-data/spot/instance-action.",
        rich_help_panel=_PANEL,
    ),
]
NoticeEvery = Annotated[
    str,
    typer.Option(
        "--notice-every", metavar="DURATION", help="Time between two questions for notices.", rich_help_panel=_PANEL
    ),
]


def notices_from(command: str, url: str, every: str) -> NoticeFrom | None:
    """Returns what is asked for notices, None if nothing is; raises UserError with every problem."""
    if problems := [*_problems(command, url, every)]:
        raise UserError(problems)
    every_s = (parse_duration(every) or 0) / 1e9
    return NoticeFrom(tuple(shlex.split(command)), url, every_s) if command or url else None


def _problems(command: str, url: str, every: str) -> Iterator[Problem]:
    if command and url:
        yield Problem("--notice-url", "a command or a URL", "both")
    if command:
        yield from _of_command(command)
    if url and not url.startswith(("http://", "https://")):
        yield Problem("--notice-url", "an address that begins with http:// or https://", repr(url))
    if (parse_duration(every) or 0) < _LEAST_NS:
        yield Problem("--notice-every", f"{DURATION_FORM}, 100ms or more", repr(every))


def _of_command(command: str) -> Iterator[Problem]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Problem("--notice-command", "a command", repr(command), str(error))
        return
    if not words or shutil.which(words[0]) is None:
        yield Problem("--notice-command", "a program that can be run", repr(command), "no shell reads it")
