"""The logger `prometheus`: figures of a run in Prometheus's text format, in a file or on a port of this host.

Rules: the file is replaced as a whole, at most once a second, as the textfile collector of the node exporter wants it.
The port answers on the loopback address only, and closes with the run; the file stays. Seconds and counts are those
since this logger was started.
"""

from __future__ import annotations

import math
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engine.core.errors import StorageError
from engine.core.job.job import Job
from engine.files.atomic_write import write_named
from engine.observers.loggers import CoverDone, RecoveryDone, StepDone, TrainingDone, ValidationDone

FILE = "metrics.prom"  # in the run's folder
ADDRESS = "127.0.0.1"
_EVERY_S = 1.0
_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
_GAUGE, _COUNTER = "gauge", "counter"
# Metric -> its type and meaning; each has the label `run`.
METRICS = {
    "steps_total": (_COUNTER, "Committed steps; a step that is trained again counts again."),
    "step": (_GAUGE, "The last committed step, from 0."),
    "planned_steps": (_GAUGE, "Steps of the job; 0 if it is not known."),
    "loss": (_GAUGE, "Mean loss of the last committed step."),
    "grad_norm": (_GAUGE, "Norm of the gradients of the last committed step."),
    "samples_total": (_COUNTER, "Samples in committed steps."),
    "last_commit_timestamp_seconds": (_GAUGE, "Time of the last commit, since 1970."),
    "training_seconds_total": (_COUNTER, "Time from the start of training to the last commit."),
    "useful_seconds_total": (_COUNTER, "The part of it in which new steps were trained: without stalls and repeats."),
    "goodput_ratio": (_GAUGE, "Useful by training seconds."),
    "recoveries_total": (_COUNTER, "Recoveries, by evicted workers and the source of their state."),
    "stall_seconds_total": (_COUNTER, "Time in which training stalled, by evicted workers."),
    "recovery_seconds_total": (_COUNTER, "Time of the phases of recoveries, by evicted workers."),
    "lost_steps_total": (_COUNTER, "Committed steps that were lost and trained again."),
    "uncovered_stages": (_GAUGE, "Stages, or blocks, whose state only one worker holds."),
    "replicas_differ": (_GAUGE, "1 if two replicas of a layer had different bits, which ends the run."),
    "validation_loss": (_GAUGE, "Mean loss of the last validation, by evaluation set."),
    "exit_code": (_GAUGE, "Exit code of training, once it has ended."),
}


class PrometheusLogger:
    """Writes the metrics to `place`: a path, or a port of the loopback address; by default a file of the run."""

    def __init__(self, place: str = "") -> None:
        self._place = place
        self._values: dict[str, dict[str, float]] = {name: {} for name in METRICS}  # by labels
        self._lock = threading.Lock()  # of the values, which another thread reads
        self._newest, self._run = -1, ""
        self._server: ThreadingHTTPServer | None = None
        self._is_over = threading.Event()
        self._writing: threading.Thread | None = None
        self._error: StorageError | None = None

    def start(self, job: Job, folder: Path) -> None:
        """Opens the port, or starts the thread that writes the file; raises OSError for a port that is in use."""
        self._run = _label("run", folder.name)
        self._set("planned_steps", job.steps)
        for name in ("steps_total", "uncovered_stages", "replicas_differ", "lost_steps_total"):
            self._set(name, 0)
        if self._place.isdigit():
            self._server = _served(int(self._place), self)
        else:
            path = Path(self._place or folder / FILE)
            self._writing = threading.Thread(target=self._write_on, args=(path,), daemon=True)
            self._writing.start()

    def step(self, done: StepDone) -> None:
        """Adds a committed step; raises the StorageError with which writing the file has ended."""
        if self._error is not None:
            raise self._error
        stalled_s = sum((each.stall_ms or 0.0) / 1e3 for each in done.recoveries)
        useful_s = max(0.0, done.seconds - stalled_s) if done.step > self._newest else 0.0
        self._newest = max(self._newest, done.step)
        self._add("steps_total", 1)
        self._add("samples_total", done.samples)
        elapsed_s = self._add("training_seconds_total", done.seconds)
        useful_s = self._add("useful_seconds_total", useful_s)
        if elapsed_s > 0:
            self._set("goodput_ratio", useful_s / elapsed_s)
        self._set("step", done.step)
        self._set("loss", done.loss)
        self._set("grad_norm", done.grad_norm)
        self._set("last_commit_timestamp_seconds", done.at_s)

    def recovery(self, done: RecoveryDone) -> None:
        """Adds a recovery."""
        culprit = ",".join(map(str, done.workers)) or "none"
        self._add("recoveries_total", 1, culprit=culprit, source=done.rung)
        self._add("stall_seconds_total", (done.stall_ms or 0.0) / 1e3, culprit=culprit)
        self._add("lost_steps_total", done.lost_steps)
        for phase in done.phases:
            self._add("recovery_seconds_total", phase.end_s - phase.begin_s, culprit=culprit, phase=phase.name)

    def cover(self, done: CoverDone) -> None:
        """Sets the number of stages without a second replica."""
        self._set("uncovered_stages", len(done.uncovered))

    def validation(self, done: ValidationDone) -> None:
        """Sets the loss of an evaluation set."""
        self._set("validation_loss", done.loss, set=done.name)

    def finish(self, done: TrainingDone) -> None:
        """Writes the file the last time, or closes the port."""
        self._set("exit_code", done.exit_code)
        self._set("replicas_differ", done.notice == "replicas-differ")
        self._is_over.set()
        if self._writing is not None:
            self._writing.join()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
        if self._error is not None:
            raise self._error

    @property
    def text(self) -> str:
        """The metrics as they are now."""
        with self._lock:
            lines = []
            for name, (kind, meaning) in METRICS.items():
                if values := self._values[name]:
                    lines += [f"# HELP bamboo_{name} {meaning}", f"# TYPE bamboo_{name} {kind}"]
                    lines += [f"bamboo_{name}{{{labels}}} {_number(value)}" for labels, value in values.items()]
        return "\n".join(lines) + "\n"

    def _set(self, name: str, value: float, **labels: str) -> None:
        with self._lock:
            self._values[name][self._labels(labels)] = float(value)

    def _add(self, name: str, value: float, **labels: str) -> float:
        key = self._labels(labels)
        self._set(name, self._values[name].get(key, 0.0) + value, **labels)
        return self._values[name][key]

    def _labels(self, labels: dict[str, str]) -> str:
        return ",".join((self._run, *map(_label, labels, labels.values()))) if labels else self._run

    def _write_on(self, path: Path) -> None:
        written, is_last = "", False
        while not is_last:
            is_last = self._is_over.wait(_EVERY_S if written else 0.0)
            if (text := self.text) != written:
                try:
                    write_named(path, written := text)
                except StorageError as error:
                    self._error = error
                    return


def _label(name: str, value: str) -> str:
    return f'{name}="{value.translate(_ESCAPES)}"'


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _served(port: int, logger: PrometheusLogger) -> ThreadingHTTPServer:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = logger.text.encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass  # a line for each scrape would fill the log

    try:
        server = ThreadingHTTPServer((ADDRESS, port), Page)
    except OSError as error:
        raise OSError(f"port {port} of {ADDRESS}: {error.strerror}; name another one: prometheus:PORT") from error
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.25}, daemon=True).start()
    return server
