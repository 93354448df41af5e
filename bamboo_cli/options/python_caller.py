"""The hidden option of `bamboo run` for `engine.train`, which starts the command from a Python program.

Rules: the first line of the standard input has values of fields, as one JSON object. The input stays open while its
writer lives. At its end the writer has ended, and the run is asked to end as by SIGTERM. The first line of the output
names the folder of the run, as one JSON object.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from bamboo_cli.terminal.echo import echo

if TYPE_CHECKING:
    from engine.core.config.job import Job
    from engine.files.jobs.job_layers import Layer
    from engine.harness.screen import Screen
    from engine.runtime.agent.run_view import RunView

Keywords = Annotated[
    bool, typer.Option("--keywords", hidden=True, help="Read values of fields from the standard input.")
]


def caller_layer() -> Layer:
    """Returns the layer of the values in the first line of the standard input."""
    from engine.files.jobs.job_layers import keyword_layer

    return keyword_layer(json.loads(sys.stdin.buffer.readline()), "train()")


def _end_with_caller() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):  # not through a buffer, which this thread would hold at the end of Python
            pass
    os.kill(os.getpid(), signal.SIGTERM)


def announcing(screen: Screen, keywords: bool) -> Screen:
    """Returns a screen that also prints the folder of a run, but of no twin; from now on the run ends with its caller.

    Without `keywords` the caller is no Python program, and the screen stays as it is.
    """
    if not keywords:
        return screen
    threading.Thread(target=_end_with_caller, daemon=True).start()
    is_told = False

    @contextlib.contextmanager
    def picture(job: Job, events: Path) -> Iterator[Callable[[RunView], None]]:
        nonlocal is_told
        if not is_told:
            is_told = True
            echo(json.dumps({"run_dir": str(events.parent)}))
            sys.stdout.flush()
        shown: AbstractContextManager[Callable[[RunView], None]] = screen.picture(job, events)
        with shown as show:
            yield show

    return replace(screen, picture=picture)
