"""Calls commands in this process with any words; what they would start, reach or strike is stopped before."""

from __future__ import annotations

import functools
import os
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
from typer.testing import CliRunner

from bamboo_cli import app, bench
from engine.core.errors import BambooError, ExitCode, UserError
from engine.harness import host_agent, job_checks

ACTED = -1  # the command took its words, and was stopped where it would have acted
_connect = socket.socket.connect


class Acted(BaseException):
    """Raised in place of an act; no handler of errors takes it for one."""


class Ended(NamedTuple):
    """The end of a command: its exit code, its text, and the problems that it told."""

    code: int
    text: str
    problems: tuple[Any, ...] = ()


def confined(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets commands work in a folder, and keeps them from acting beyond it."""
    for name in [name for name in os.environ if name.startswith("BAMBOO_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.chdir(folder)
    for owner, name in ((subprocess, "Popen"), (os, "fork"), (os, "kill"), (os, "posix_spawn")):
        monkeypatch.setattr(owner, name, _act)
    monkeypatch.setattr(socket.socket, "connect", _connect_by_datagram)
    monkeypatch.setattr(job_checks, "ask", lambda *words: {"samples": 1000})
    monkeypatch.setattr(app, "load", functools.cache(app.load))
    monkeypatch.setattr(bench, "import_module", lambda name: _AnyBenchmark())
    monkeypatch.setattr(bench, "_run", _act)
    monkeypatch.setattr(host_agent, "run_on_hosts", _act)


def called(*words: str) -> Ended:
    """Returns how a command line ends; an internal error is raised."""
    try:
        result = CliRunner().invoke(app.app, list(words))
    except Acted:
        return Ended(ACTED, "")
    error = result.exception
    if isinstance(error, BambooError) and error.exit_code != ExitCode.INTERNAL:
        return Ended(int(error.exit_code), str(error), error.problems if isinstance(error, UserError) else ())
    if isinstance(error, OSError):
        return Ended(int(ExitCode.STORAGE), str(error))
    if error is not None and not isinstance(error, SystemExit):
        raise AssertionError(f"an internal error of {words!r}") from error
    return Ended(result.exit_code, result.output)


def leaves(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields each command below a command or a group, with its words."""
    if not hasattr(command, "commands"):
        yield path, command
        return
    for name, each in command.commands.items():
        yield from leaves(each, (*path, name))


def _act(*words: Any, **settings: Any) -> NoReturn:
    raise Acted


def _connect_by_datagram(link: socket.socket, place: Any) -> None:
    if link.type != socket.SOCK_DGRAM:
        raise Acted
    _connect(link, place)  # which sends nothing


class _AnyBenchmark(SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return lambda quick: {"case": None}
