"""Watches a run from another process with another clock, strikes its workers, and measures how long training stood.

Rules: a commit is seen when its line is in the file, and is stamped with the observer's clock. The time that training
stood is the gap between two such stamps, less the median of the last ten steps since the recovery before; the first
step of a run and the first step after a recovery do not count. On a busy machine that median may be too long: training
may have stood up to the gap less the shortest step. Nothing that the run measured is used.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from engine.core.faults.fault import Fault
from engine.core.job.job import Job
from engine.files.events_file import read_history
from engine.report.load import load
from engine.runtime.agent.session import run_session
from engine.runtime.process.fork_client import ForkServer

SILENCE_S = 1.0
_GRACE_S = 60.0
_POLL_S = 0.0005
_LIMIT_S = 120.0
_COMMIT = re.compile(rb'\{"event":"commit",.*?"step":(\d+)')
_STARTED = re.compile(rb'\{"event":"started",.*?"of":(\d+),"child":(\d+)')
_SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "notice": signal.SIGTERM}


class Strike(NamedTuple):
    """What happens to a worker, some seconds after a commit is seen: a signal, or an order to hang or to raise."""

    do: str
    worker: int
    step: int
    delay_s: float = 0.0


class Case(NamedTuple):
    """One recovery: the row of the report, and the milliseconds that the observer found.

    `stood_ms` is None if no step was usual; `most_ms` is then the gap less the shortest step of the run.
    """

    row: dict[str, Any]
    most_ms: float
    stood_ms: float | None

    @property
    def difference_ms(self) -> float:
        """The time that the report says less the truth; 0 if the truth may lie within the bounds of the report."""
        truth_ms = self.most_ms if self.stood_ms is None else self.stood_ms
        least_ms, most_ms = self.row["stall_ms"], self.row["stall_most_ms"]
        return most_ms - truth_ms if most_ms < truth_ms else max(0.0, least_ms - max(truth_ms, self.most_ms))

    @property
    def tolerance_ms(self) -> float:
        """5 ms, or 2 % of the truth."""
        return max(5.0, 0.02 * (self.stood_ms or 0.0))

    @property
    def is_true(self) -> bool:
        """Whether the report is the truth, within the tolerance."""
        return abs(self.difference_ms) <= self.tolerance_ms


@dataclass
class Observer:
    """Follows the events of one run."""

    events: Path
    orders: Path
    strikes: list[Strike]
    commits_ns: dict[int, int] = field(default_factory=dict)
    pids: dict[int, int] = field(default_factory=dict)
    _position: int = 0

    def follow(self, ending: Future[str]) -> None:
        """Returns when the run has ended."""
        until_s = time.monotonic() + _LIMIT_S
        with _first_in_line():
            while not ending.done() and time.monotonic() < until_s:
                self._look()
                if self.strikes and self.strikes[0].step in self.commits_ns:
                    due_ns = self.commits_ns[self.strikes[0].step] + self.strikes[0].delay_s * 1e9
                    if _now_ns() >= due_ns:
                        self._strike(self.strikes.pop(0))
                time.sleep(_POLL_S)
        self._look()

    def _look(self) -> None:
        if not self.events.exists():
            return
        with self.events.open("rb") as file:
            file.seek(self._position)
            data = file.read()
        now_ns = _now_ns()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        self.commits_ns |= {int(step): now_ns for step in _COMMIT.findall(whole)}
        self.pids |= {int(worker): int(pid) for worker, pid in _STARTED.findall(whole)}

    def _strike(self, strike: Strike) -> None:
        pid = self.pids[strike.worker]
        if strike.do in _SIGNALS:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, _SIGNALS[strike.do])
        else:
            hidden = self.orders / f".{pid}"
            hidden.write_text(strike.do)
            hidden.rename(self.orders / str(pid))

    def stood_ms(self, step: int, before: int, after: int, moved: bool) -> tuple[float, float | None]:
        """Returns the most that training can have stood before the commit of a step, and how long it stood.

        `before` and `after` are the steps of the neighbouring recoveries; `moved` if a slot changed its owner.
        """
        usual = range(max(before + 2, step - 10), step) or range(step + 2, 0 if moved else min(after, step + 12))
        lasted_ms = [self._lasted_ms(each) for each in usual]
        shortest_ms = min(self._lasted_ms(each) for each in range(1, max(self.commits_ns) + 1))
        most_ms = self._lasted_ms(step) - shortest_ms
        return most_ms, max(0.0, self._lasted_ms(step) - median(lasted_ms)) if lasted_ms else None

    def longest_after(self, step: int) -> int:
        """Returns the step that took longest of the next few."""
        return max(range(step + 1, step + 6), key=self._lasted_ms)

    def _lasted_ms(self, step: int) -> float:
        before_ns = self.commits_ns.get(step - 1)
        return float("nan") if before_ns is None else (self.commits_ns[step] - before_ns) / 1e6


class Runs:
    """Runs jobs in a child process, and observes them from this one; a context."""

    def __init__(self, folder: Path):
        self.events = folder  # of the last run
        self._folder = folder
        self._count = 0
        self._pool = ProcessPoolExecutor(1, get_context("spawn"))

    def __enter__(self) -> Runs:
        self._pool.submit(_begin).result()
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.submit(_end).result()
        self._pool.shutdown()

    def cases(self, fields: dict[str, Any], faults: Sequence[Fault] = (), strikes: Sequence[Strike] = ()) -> list[Case]:
        """Runs a job of sleeping layers with injected faults and with strikes from outside; returns its recoveries."""
        self._count += 1
        folder = self._folder / str(self._count)
        orders = folder / "orders"
        orders.mkdir(parents=True)
        job = job_of(orders, **fields)
        self.events = folder / "events.jsonl"
        observer = Observer(self.events, orders, list(strikes))
        ending = self._pool.submit(_run, job, folder, tuple(faults))
        observer.follow(ending)
        error = ending.result(timeout=_LIMIT_S)
        assert not error, f"{folder}: {error}"
        assert not observer.strikes, f"{folder}: {observer.strikes} did not land"
        cases = list(_cases(observer))
        still = {observer.longest_after(each.step) for each in strikes if each.do in ("stop", "hang")}
        assert still <= {case.row["step"] for case in cases}, f"{folder}: training stood in the steps {still}"
        return cases


def job_of(orders: Path, stages: int, steps: int) -> Job:
    """Returns a job of one layer per stage whose steps take some 50 ms."""
    return Job(
        model="tests.e2e.stall_models:obeying",
        model_args={"layers": stages, "orders": str(orders)},
        stages=stages,
        steps=steps,
        microbatches=4,
        microbatch_size=2,
        validate_every=0,
        audit=0,
        silent_after=f"{SILENCE_S}s",
    )


def _cases(observer: Observer) -> Iterator[Case]:
    table = load(read_history(observer.events)).recovery
    rows = [row for row in table.to_dict("records") if row["outcome"] == "recovered"]
    steps = [-1, *(int(row["step"]) for row in rows), max(observer.commits_ns) + 1]
    for row, before, step, after in zip(rows, steps, steps[1:], steps[2:], strict=False):
        yield Case(row, *observer.stood_ms(step, before, after, moved=bool(row["heirs"])))


@contextlib.contextmanager
def _first_in_line() -> Iterator[None]:
    """Lets this thread run before others, where it may, so that a busy machine does not delay what it stamps."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def _now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC_RAW)


_server: list[ForkServer] = []  # of the child process


def _begin() -> None:
    _server.append(ForkServer())


def _end() -> None:
    _server.pop().close()


def _run(job: Job, folder: Path, faults: tuple[Fault, ...]) -> str:
    """Runs a job; returns its error, or an empty text."""
    with _first_in_line():
        ending = run_session(
            job,
            folder / "events.jsonl",
            folder,
            faults=faults,
            server=_server[0],
            grace_s=_GRACE_S,
        )
    return "" if ending.error is None else str(ending.error)
