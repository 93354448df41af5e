"""The options of `bamboo run` that ask a command or a URL for notices."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from typing import Annotated
from urllib.parse import urlsplit

import typer

from engine.core.agent.notice_answer import NoticeFrom
from engine.core.duration import DURATION_FORM, parse_duration
from engine.core.errors import Problem, UserError

_PANEL = "Failures"
_LEAST_NS = 100_000_000
_EVERY = "5s"
NoticeCommand = Annotated[
    str | None,
    typer.Option(
        "--notice-command",
        metavar="COMMAND",
        help="Ask this command for notices: what it prints with exit code 0, worker numbers or any text, is one.",
        rich_help_panel=_PANEL,
    ),
]
NoticeUrl = Annotated[
    str | None,
    typer.Option(
        "--notice-url",
        metavar="URL",
        help="Ask this URL for notices, such as http://169.254.169.254/latest/meta-data/spot/instance-action.",
        rich_help_panel=_PANEL,
    ),
]
NoticeEvery = Annotated[
    str | None,
    typer.Option(
        "--notice-every",
        metavar="DURATION",
        help="Time between two questions for notices (default 5s).",
        rich_help_panel=_PANEL,
    ),
]


def asking(command: str | None, url: str | None, every: str | None, in_process: bool = False) -> NoticeFrom | None:
    """Returns what is asked for notices, None if nothing is; raises UserError with every problem."""
    if problems := [*_problems(command, url, every, in_process)]:
        raise UserError(problems)
    every_s = (parse_duration(every or _EVERY) or 0) / 1e9
    return NoticeFrom(tuple(shlex.split(command or "")), url or "", every_s) if command or url else None


def _problems(command: str | None, url: str | None, every: str | None, in_process: bool) -> Iterator[Problem]:
    if command is not None and url is not None:
        yield Problem("--notice-url", "a command or a URL", "both")
    if command is not None:
        yield from _of_command(command)
    if url is not None:
        yield from _of_url(url)
    if every is not None and (parse_duration(every) or 0) < _LEAST_NS:
        yield Problem("--notice-every", f"{DURATION_FORM}, 100ms or more", repr(every))
    if every is not None and command is None and url is None:
        yield Problem("--notice-every", "--notice-command or --notice-url beside it", "neither")
    if in_process and not (command is None and url is None):
        name = "--notice-url" if command is None else "--notice-command"
        yield Problem(name, "workers that are processes", "--in-process", "a thread gets no signal")


def _of_url(url: str) -> Iterator[Problem]:
    if not url.startswith(("http://", "https://")):
        yield Problem("--notice-url", "an address that begins with http:// or https://", repr(url))
        return
    try:
        parts = urlsplit(url)
        is_whole = bool(parts.hostname) and "@" not in parts.netloc and parts.port != 0
    except ValueError:  # of the port
        is_whole = False
    if not is_whole or any(not each.isprintable() or each == " " for each in url):
        hint = "http://HOST:PORT/PATH, without a user and a password"
        yield Problem("--notice-url", "an address with a host", repr(_without_user(url)), hint)


def _without_user(url: str) -> str:
    """Returns an address without a password that may stand in it."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _of_command(command: str) -> Iterator[Problem]:
    try:
        words = shlex.split(command)
    except ValueError as error:
        yield Problem("--notice-command", "a command", repr(command), str(error))
        return
    if not words or shutil.which(words[0]) is None:
        yield Problem("--notice-command", "a program that can be run", repr(command), "no shell reads it")
