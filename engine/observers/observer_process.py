"""``python -m engine.observers.observer_process PARENT NAME EVENTS FD`` runs one logger beside a run.

Rules: it ends with the launcher, at the end of training, or with the first exception of the logger, which goes to its
log and, in one line, to the progress page behind FD.
"""

from __future__ import annotations

import sys
import time
import traceback
from pathlib import Path

from engine.core.texts import printable
from engine.observers.observers import LoggerFeed, LoggerProgress, ProgressPage, made_logger
from engine.runtime.process.interrupts import ignore_ctrl_c
from engine.runtime.process.prctl import die_with_parent, name_process

_POLL_S = 0.25  # a look costs as much as several steps
_OURS = str(Path(__file__).parents[1])
_MOST_OF_ERROR = 500


def main(parent: int, name: str, events: Path, fd: int) -> int:
    """Runs a logger until the end of training; returns the exit code of the process."""
    ignore_ctrl_c()
    die_with_parent(parent)
    name_process(f"bamboo-log-{name}")
    page, following = ProgressPage(fd), None
    try:
        following = LoggerFeed(made_logger(name), events, lambda step: page.write(LoggerProgress(step)))
        page.write(LoggerProgress())
        while not following.is_over:
            following.read_on()
            time.sleep(0 if following.is_over else _POLL_S)
        page.write(LoggerProgress(following.last_step, is_over=True))
    except BaseException as error:  # the logger is code of the user's, and may raise anything
        traceback.print_exc()
        page.write(LoggerProgress(-1 if following is None else following.last_step, error=words(error)))
        return 1
    return 0


def words(error: BaseException) -> str:
    """Returns an exception in one line, with the innermost line of the user's code, else the innermost line."""
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [frame for frame in frames if not frame.filename.startswith((_OURS, "<"))]
    library = ("site-packages", sys.base_prefix)
    own = [frame for frame in foreign if not any(part in frame.filename for part in library)]
    place = next((f" ({frame.filename}:{frame.lineno}, in {frame.name})" for frame in reversed(own or foreign)), "")
    try:
        text = " ".join(f"{type(error).__name__}: {error}".split())
    except Exception:
        text = type(error).__name__
    return printable(text[:_MOST_OF_ERROR] + place)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), int(sys.argv[4])))
