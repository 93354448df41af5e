"""Callbacks of a program: called in a thread of its process with all that the run commits, as loggers are.

Rules: the run is another process and never waits for a callback. An exception in a callback is told once, on stderr,
and ends that callback only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from engine.observers.following import Following
from engine.observers.logger import Logger, StepDone

Callback = Callable[[StepDone], object] | Logger

_POLL_S = 0.1
_HOOKS = ("start", "step", "recovery", "validation", "finish")


class _Steps:
    """A logger that calls a function with each committed step."""

    def __init__(self, function: Callable[[StepDone], object]):
        self.step = function


class Callbacks:
    """The callbacks of a run, each with its own place in the events."""

    def __init__(self, callbacks: Sequence[Callback], events: Path, is_over: Callable[[], bool]):
        self._is_over = is_over
        self._following = [Following(_logger(each), events) for each in callbacks]
        self._thread = threading.Thread(target=self._follow, name="bamboo-callbacks", daemon=True)
        if self._following:
            self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits, `timeout_s` at most, until each callback has had the end of the run."""
        if self._following:
            self._thread.join(timeout_s)

    def _follow(self) -> None:
        left = self._following
        with contextlib.suppress(OSError):
            while left:
                is_last = self._is_over()
                left = [each for each in left if self._goes_on(each)]
                if is_last:
                    return
                time.sleep(_POLL_S)

    def _goes_on(self, following: Following) -> bool:
        try:
            following.read_on()
        except Exception:
            print("a callback has raised, and is called no more:", file=sys.stderr)
            traceback.print_exc()
            return False
        return not following.is_over


def _logger(callback: Callback) -> object:
    if any(callable(getattr(callback, name, None)) for name in _HOOKS):
        return callback
    return _Steps(callback)  # type: ignore[arg-type]
