"""Runs a command on a pseudo-terminal, so that it sees a terminal of a known width."""

from __future__ import annotations

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# The environment of the tests must not decide on colours or widths.
_UNSET = ("NO_COLOR", "FORCE_COLOR", "CLICOLOR", "COLUMNS", "LINES", "GITHUB_ACTIONS", "PY_COLORS", "COLORTERM")


def shown_by(command: Sequence[str | Path], columns: int = 80, environment: Mapping[str, str] | None = None) -> str:
    """Returns the output of a command on a terminal, with its escape codes; lines end as in a file."""
    known = {name: value for name, value in os.environ.items() if name not in _UNSET}
    known |= {"TERM": "xterm", "PYTHONPATH": str(ROOT)} | dict(environment or {})
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    with subprocess.Popen(
        list(map(str, command)), stdin=follower, stdout=follower, stderr=follower, env=known, start_new_session=True
    ):
        os.close(follower)
        shown = bytearray()
        while True:
            try:
                read = os.read(leader, 65536)
            except OSError:  # every writer is gone
                break
            if not read:
                break
            shown += read
    os.close(leader)
    return shown.decode().replace("\r\n", "\n")


def bamboo(*arguments: str | Path) -> list[str]:
    """Returns the command line of the program."""
    return [sys.executable, "-m", "bamboo_cli", *map(str, arguments)]
