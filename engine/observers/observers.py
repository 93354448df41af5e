"""The loggers of a run as processes beside its launcher: their start, their errors, and the wait at the end.

Rules: no thread of the launcher runs a logger, and the launcher never waits for one before the end of training. While
steps are trained, a logger that computes more than `_SHARE` of a core gets a quarter of the time that no other process
wants.
After the end it has `DRAIN_S` to take the rest, and `INTERRUPTED_S` of an interrupted run. The launcher says which
steps a logger has not taken, and why a logger has ended, and goes on: a logger decides no exit code.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from engine.core.config.job import Job, logger_names
from engine.files.atomic_write import open_to_append
from engine.observers.slate import Slate
from engine.runtime.process import subprocesses
from engine.runtime.process.interrupts import present

View = TypeVar("View")

DRAIN_S = 10.0
INTERRUPTED_S = 0.5
_SHARE, _AT_ONCE_S = 0.01, 0.2  # of a core's time, while steps are trained: on average, and beyond that
_POLL_S = 0.01
_TICKS = os.sysconf("SC_CLK_TCK")
_PROCESS = "engine.observers.observer_process"


@dataclass(slots=True)
class Observer:
    """One logger: its process, its progress, and whether its end was told.

    `since` has the time at which the first step was seen, and the time that the process had computed until then.
    """

    name: str
    process: subprocess.Popen[bytes]
    slate: Slate
    log: Path
    is_told: bool = False
    since: tuple[float, float] | None = None
    is_slowed: bool = False
    num_looks: int = 0  # since then

    def hold_back(self) -> None:
        """Gives the process only idle time from now on if it computes too much, and that in one of four looks."""
        if (computed_s := _computed_s(self.process.pid)) is None:
            return
        begun_s, before_s = self.since = self.since or (time.monotonic(), computed_s)
        if not self.is_slowed and computed_s - before_s > _AT_ONCE_S + _SHARE * (time.monotonic() - begun_s):
            self.is_slowed = True
            self._schedule(os.SCHED_IDLE, 19)
        if self.is_slowed:
            self.num_looks += 1
            self.process.send_signal(signal.SIGSTOP if self.num_looks % 4 else signal.SIGCONT)

    def let_run(self) -> None:
        """Gives the process its usual share again, where the kernel lets this user do that."""
        if self.is_slowed:
            self.process.send_signal(signal.SIGCONT)
            self._schedule(os.SCHED_OTHER, 0)

    def _schedule(self, policy: int, nice: int) -> None:
        with contextlib.suppress(OSError):  # where sessions share the time, the policy counts inside of one only
            fd = os.open(f"/proc/{self.process.pid}/autogroup", os.O_WRONLY)
            try:
                os.write(fd, str(nice).encode())
            finally:
                os.close(fd)
        with contextlib.suppress(OSError):
            for each in os.listdir(f"/proc/{self.process.pid}/task"):
                os.sched_setscheduler(int(each), policy, os.sched_param(0))


class Observers:
    """The loggers of one run; `say` gets a line about each that ends too early."""

    def __init__(self, job: Job, events: Path, logs: Path, say: Callable[[str], None]):
        self._say = say
        self._observers = [_started(name, events, logs) for name in logger_names(job.logger)]

    def look(self) -> None:
        """Tells the error of each logger that has ended since the last look."""
        for each in self._observers:
            if not each.is_told and each.process.poll() is not None and not (progress := each.slate.read()).is_over:
                each.is_told = True
                why = progress.error or f"it ended with exit code {each.process.returncode}"
                self._say(f"logger {each.name} has ended, training goes on: {why}; its output: {each.log}")

    def watching(self, show: Callable[[View], None], trains: Callable[[View], bool]) -> Callable[[View], None]:
        """Returns a function that shows a view of the run, and looks; `trains`: whether a step is committed."""

        def watch(view: View) -> None:
            show(view)
            self.look()
            for each in self._observers if trains(view) else ():
                each.hold_back()

        return watch

    def finish(self, committed: int) -> tuple[dict[str, Any], ...]:
        """Waits until the loggers have taken the end, ends the others, and returns the words about all of them."""
        begun_s, limit_s = time.monotonic(), DRAIN_S
        for each in self._observers:
            each.let_run()
        while any(each.process.poll() is None for each in self._observers):
            if limit_s == DRAIN_S and _is_interrupted():
                limit_s = min(DRAIN_S, time.monotonic() - begun_s + INTERRUPTED_S)
            if time.monotonic() > begun_s + limit_s:
                break
            time.sleep(_POLL_S)
        self.look()
        return tuple(self._end(each, committed, limit_s) for each in self._observers)

    def kill(self) -> None:
        """Ends all processes at once."""
        for each in self._observers:
            each.process.kill()
            each.process.wait()
            each.slate.close()
        self._observers = []

    def _end(self, observer: Observer, committed: int, limit_s: float) -> dict[str, Any]:
        is_late = observer.process.poll() is None
        if is_late:
            observer.process.kill()
            observer.process.wait()
        progress = observer.slate.read()
        error = progress.error
        if is_late:
            error = f"it took longer than {limit_s:.1f} s after the end of training"
            self._say(
                f"logger {observer.name} was ended: {error}; it has logged {progress.last_step + 1} of "
                f"{committed + 1} steps"
            )
        return {"logger": observer.name, "last_step": progress.last_step, "whole": progress.is_over, "error": error}


def _computed_s(pid: int) -> float | None:
    """Returns the time that a process has computed; None if it has ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _is_interrupted() -> bool:
    interrupts = present()
    return interrupts is not None and interrupts.first is not None


def _started(name: str, events: Path, logs: Path) -> Observer:
    log = logs / f"logger-{name.replace(':', '.')}.log"
    slate = Slate.new()
    arguments = str(os.getpid()), name, str(events.resolve()), str(slate.fd)
    with open(open_to_append(log), "ab") as file:
        process = subprocesses.start(subprocesses.module(_PROCESS, *arguments), fd=slate.fd, log=file)
    return Observer(name, process, slate, log)


@contextlib.contextmanager
def observing(job: Job, events: Path, logs: Path, say: Callable[[str], None]) -> Iterator[Observers]:
    """Runs the loggers of a job beside the block; they have ended after it."""
    observers = Observers(job, events, logs, say)
    try:
        yield observers
    finally:
        observers.kill()
