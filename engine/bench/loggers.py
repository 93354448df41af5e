"""Measures what loggers cost: the CPU time of their processes per step, beside the time of the step.

The loggers follow a made-up run in their own processes, as beside a launcher, all at the same time: their commits come
as those of a run with steps of this length. A server here takes the spans, and scrapes the port every second. The CPU
time has all threads of a process, without its start. It is the most that training can lose, if no core is idle.
"""

from __future__ import annotations

import os
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from engine.bench.figures import BenchRow, Cases, in_turns, interval_rows, ratio_row
from engine.bench.runs import run_bamboo, seconds_between_commits
from engine.codec.records import encoded
from engine.core.errors import ensure
from engine.core.history.run_records import AGENT, VERSION, CommitRecord, GoRecord, JobRecord, Record
from engine.core.job.job import Job
from engine.observers.observers import Observer, Observers, logger_problems

_SHARE = 0.005  # of a step
_STEP_S = 0.1
_WARM_S = 2.0
_LOOK_S, _SCRAPE_S = 0.25, 1.0  # of the launcher; of the port
_START_S = 60.0
_SPANS = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Idle:
    """A logger without a method: what is left is the reading of the records."""


def logger_cases(quick: bool) -> Cases:
    """Returns the cases: steps of 100 ms, steps of the default job, and runs of it with loggers beside runs without."""
    measured_s, num_pairs, num_steps = (2.0, 1, 4) if quick else (60.0, 7, 60)
    return {
        "steps of 100 ms": lambda folder: _bench_shares("steps of 100 ms", _STEP_S, measured_s, folder),
        "steps of gpt": lambda folder: _bench_shares(
            "steps of gpt", _step_s(num_steps, "", folder), measured_s, folder
        ),
        "gpt with loggers": lambda folder: _bench_runs(num_pairs, num_steps, folder),
    }


def _bench_runs(num_pairs: int, num_steps: int, folder: Path) -> list[BenchRow]:
    loggers = ",".join(_installed("prometheus", "otel"))
    sides = {logger: partial(_step_s, num_steps, logger, folder) for logger in (loggers, "")}
    with _collector():
        ours, peer = in_turns(sides, num_pairs).values()
    return interval_rows(f"gpt with {loggers}", "time between commits s", ours, peer, 1 + _SHARE)


def _step_s(num_steps: int, logger: str, folder: Path) -> float:
    variables = {_SPANS: os.environ[_SPANS]} if logger else {}
    settings = ("--set", f"logger={logger}") if logger else ()
    return seconds_between_commits(run_bamboo(folder, "--steps", str(num_steps), *settings, **variables))


def _bench_shares(case: str, step_s: float, measured_s: float, folder: Path) -> list[BenchRow]:
    """Returns a row for each logger, and one for the launcher's looks at them, with seconds per step."""
    with ExitStack() as stack:
        run = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        stack.enter_context(_collector())
        port = _free_port()
        names = _installed(f"{__name__}:{Idle.__name__}", "prometheus", f"prometheus:{port}", "otel")
        job, events = Job(logger=",".join(names), steps=10**6), run / "events.jsonl"
        _append(events, JobRecord(**_stamp(), version=VERSION, job=job), GoRecord(**_stamp(), epoch=1, end=False))
        observers = Observers(job, events, run, lambda line: ensure(False, line))
        stack.callback(observers.kill)
        feed = _MadeUpRun(events, step_s, observers, port)
        feed.go_on(_START_S, until=lambda: all(each.page.read().last_step >= 0 for each in observers.observers))
        ensure(all(each.page.read().last_step >= 0 for each in observers.observers), "each logger has started")
        feed.is_looking = True  # the first steps of a run come later than the imports of its loggers, too
        feed.go_on(_WARM_S)
        before = [_cpu_s(each) for each in observers.observers]
        steps, looked_s = feed.num_steps, feed.looked_s
        feed.go_on(measured_s)
        spent_s = [_cpu_s(each) - before_s for each, before_s in zip(observers.observers, before, strict=True)]
        steps = feed.num_steps - steps
        sides = [*zip(("none, only its process", *names[1:]), spent_s, strict=True)]
        sides = [("prometheus:PORT" if str(port) in name else name, taken_s) for name, taken_s in sides]
        sides.append(("the launcher, for all of them", feed.looked_s - looked_s))
        return [ratio_row(case, f"{name}: CPU s per step", s / steps, step_s, steps, _SHARE) for name, s in sides]


class _MadeUpRun:
    """Commits a step after each `step_s`, looks at the loggers as the launcher does, and scrapes their port."""

    def __init__(self, events: Path, step_s: float, observers: Observers, port: int):
        self.num_steps = 0
        self.looked_s = 0.0  # CPU time of the looks
        self.is_looking = False
        self._events, self._step_s, self._port = events, step_s, port
        self._look: Callable[[None], None] = observers.watching(lambda view: None, lambda view: True)

    def go_on(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Goes on for so long, or until `until` is so."""
        begun_s = look_s = scrape_s = time.monotonic()
        first = self.num_steps
        while (now_s := time.monotonic()) < begun_s + seconds and not until():
            commit: dict[str, Any] = {"loss": 5.578662693500519, "grad_norm": 5.977012653163561, "clip_factor": 0.167}
            _append(self._events, CommitRecord(**_stamp(), step=self.num_steps, **commit, last=False))
            self.num_steps += 1
            if self.is_looking and now_s >= look_s:
                spent_s = time.thread_time()
                self._look(None)
                self.looked_s += time.thread_time() - spent_s
                look_s = now_s + _LOOK_S
            if self.is_looking and now_s >= scrape_s:
                urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics").close()
                scrape_s = now_s + _SCRAPE_S
            time.sleep(max(0.0, begun_s + (self.num_steps - first) * self._step_s - time.monotonic()))


def _installed(*names: str) -> list[str]:
    return [name for name in names if not logger_problems(name)]


def _append(events: Path, *records: Record) -> None:
    with events.open("a", encoding="utf-8") as file:
        file.writelines(f"{encoded(each)}\n" for each in records)


def _stamp() -> dict[str, Any]:
    return {"worker": AGENT, "pid": os.getpid(), "at_ns": time.monotonic_ns()}


def _cpu_s(observer: Observer) -> float:
    """Returns the CPU time of all threads of a logger's process, those that have ended included."""
    return time.clock_gettime(~observer.process.pid << 3 | 2)  # the clock that clock_getcpuclockid(3) names


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def _collector() -> Iterator[None]:
    """Takes what is posted to the address that the loggers read from the environment meanwhile."""

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        os.environ[_SPANS] = f"http://127.0.0.1:{server.server_port}"
        try:
            yield
        finally:
            del os.environ[_SPANS]
            server.shutdown()
