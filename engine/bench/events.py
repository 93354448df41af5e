"""Measures the events of a long run: time and memory to read a gigabyte of them, and the cost to record an action.

The run is made up: a day of the default job at 12 steps a second, as `--events-max 1GB` leaves it. It has all commits,
a recovery in every hour, and the actions and hashes of as many ranges of steps as the limit allows.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from engine.bench.figures import BenchRow, Cases, limit_row
from engine.codec.records import encoded
from engine.core.errors import WorkerFailedError
from engine.core.history.process_records import StartedRecord
from engine.core.history.run_records import (
    AGENT,
    VERSION,
    CommitRecord,
    EpochRecord,
    GoRecord,
    JobRecord,
    Record,
    ThinnedRecord,
)
from engine.core.history.step_files import FIELDS, FOLDER, StepFile, as_ranges, entry, span_of
from engine.core.job.job import Job, parse_size
from engine.core.job.partition import initial_program
from engine.files.run_folder import RunFolder, create_run_folder
from engine.runtime.process.clock import now_ns
from engine.runtime.process.recorder import Recorder, StepWriter, open_events, open_steps

_STEP_NS = 10**9 // 12
_DAY_STEPS = 24 * 3600 * 12
_HOUR_STEPS = 3600 * 12
_HASH_BYTES = 2_500  # of the audits of a step of the default job
_REPORT_S, _REPORT_MB, _STATUS_S, _ACTION_US = 10.0, 600.0, 1.0, 20.0
_NUM_RECORDS = 20_000


def events_cases(quick: bool) -> Cases:
    """Returns the cases: the reading of a long run, and the recording of actions; `quick` makes a short run."""
    num_steps, limit = (20_000, 30_000_000) if quick else (_DAY_STEPS, 10**9)
    return {
        "read": lambda folder: bench_reading(num_steps, limit, folder),
        "record": lambda folder: bench_recording(_NUM_RECORDS, folder),
    }


def bench_reading(num_steps: int, limit: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of `bamboo report` and `status` over a made-up run of `limit` bytes, and what always stays."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        run = create_run_folder(Path(name), "made-up", datetime.now(), "0000")
        _write(run, num_steps, limit)
        kept_mb = run.events.stat().st_size / 1e6
        size = sum(each.stat().st_size for each in run.path.rglob("*") if each.is_file())
        case = f"{num_steps} steps, {size / 1e9:.2f} GB"
        report_s, report_mb = _measured(name, "report")
        status_s, status_mb = _measured(name, "status", "--json", code=69)  # its launcher is gone
    most_mb = (parse_size(Job().events_max) or 0) / 1e6
    return [
        limit_row(case, "report and page s", [report_s], 1.0, _REPORT_S),
        limit_row(case, "report and page, peak memory MB", [report_mb], 1.0, _REPORT_MB),
        limit_row(case, "status s", [status_s], 1.0, _STATUS_S),
        limit_row(case, "status, peak memory MB", [status_mb], 1.0, _REPORT_MB),
        limit_row(case, "events that always stay MB", [kept_mb], 1.0, most_mb),
    ]


def _measured(results: str, *arguments: str, code: int = 0) -> tuple[float, float]:
    """Returns the seconds of a command on the latest run, and its peak memory in MB; raises WorkerFailedError."""
    command = [sys.executable, "-m", "bamboo_cli", *arguments, "latest", "--results", results]
    begin_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
        stderr = child.stderr.read() if child.stderr else ""
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != code:
        raise WorkerFailedError(f"bamboo {' '.join(arguments)} exited with code {child.returncode}:\n{stderr}")
    return time.monotonic() - begin_s, usage.ru_maxrss * 1024 / 1e6


def _write(run: RunFolder, num_steps: int, limit: int) -> None:
    """Writes the events of a made-up run."""
    job = Job(steps=num_steps, events_max=f"{limit // 1000}kB")
    span, steps = span_of(job), run.path / FOLDER
    steps.mkdir()
    templates = _templates(job)
    range_bytes = span * (sum(each.nbytes for each in templates.values()) + _HASH_BYTES)
    num_ranges = -(-num_steps // span)
    num_kept = max(2, min(num_ranges, (limit - 170 * num_steps) // range_bytes))
    ranges = {number * num_ranges // num_kept for number in range(num_kept)}
    ranges |= {step // span for step in range(_HOUR_STEPS, num_steps, _HOUR_STEPS)}
    with run.events.open("w", encoding="utf-8") as file:
        file.writelines(f"{encoded(each)}\n" for each in _records(job, [*templates]))
        thinned = as_ranges({*range(num_ranges)} - ranges, span)
        file.write(f"{encoded(ThinnedRecord(worker=AGENT, pid=1, at_ns=1, steps=thinned))}\n")
    for number in ranges:
        first = number * span
        for worker, template in templates.items():
            entries = np.tile(template, (span, 1))
            later = np.arange(span, dtype=np.int64)[:, None]
            entries["start_ns"] += _STEP_NS * (later + first)
            entries["step"] = later + first
            (steps / str(StepFile(first, worker))).write_bytes(entries.tobytes())
        (steps / str(StepFile(first, None))).write_bytes(b"x" * (_HASH_BYTES * span))


def _templates(job: Job) -> dict[int, np.ndarray]:
    """Returns the entries of each worker in step 0."""
    program, _ = initial_program(job)
    entries = {}
    for worker, actions in program.items():
        length_ns = _STEP_NS // (len(actions) + 1)
        data = b"".join(
            entry(1, 0, str(action), place * length_ns, (place + 1) * length_ns) for place, action in enumerate(actions)
        )
        entries[worker] = np.frombuffer(data, dtype=np.dtype(FIELDS)).copy()
    return entries


def _records(job: Job, workers: Sequence[int]) -> Iterator[Record]:
    """Yields the records of the launcher; in every hour a link breaks and is mended."""
    stamp: dict[str, Any] = {"worker": AGENT, "pid": 1}
    owners, shadows = tuple(workers), tuple((each,) for each in (*workers[1:], workers[0]))
    common: dict[str, Any] = {"members": owners, "verdict": (), "planned": False, "owners": owners, "shadows": shadows}
    yield JobRecord(**stamp, at_ns=1, version=VERSION, job=job)
    for worker in workers:
        yield StartedRecord(**stamp, at_ns=1, of=worker, child=100 + worker, slots=((0, worker),))
    yield EpochRecord(**stamp, at_ns=1, epoch=1, reason="every worker has joined", **common)
    yield GoRecord(**stamp, at_ns=1, epoch=1, end=False)
    epoch = 1
    for step in range(job.steps):
        at_ns = (step + 1) * _STEP_NS
        if step and step % _HOUR_STEPS == 0:
            epoch += 1
            yield EpochRecord(**stamp, at_ns=at_ns - 9, epoch=epoch, reason="a transfer broke", **common)
            yield GoRecord(**stamp, at_ns=at_ns - 8, epoch=epoch, end=False)
        norms: dict[str, Any] = {
            "loss": 5.578662693500519 / (1 + step),
            "grad_norm": 5.977012653163561,
            "clip_factor": 0.167307659867,
        }
        yield CommitRecord(**stamp, at_ns=at_ns, step=step, **norms, last=step == job.steps - 1)


def bench_recording(num_records: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time that a worker takes to record an action."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        events_fd, steps_fd = open_events(Path(name) / "events.jsonl"), open_steps(Path(name) / FOLDER)
        recorder = Recorder(events_fd, 0, StepWriter(steps_fd, 0, span_of(Job())))
        times_us = []
        for number in range(num_records):
            begin_ns = now_ns()
            recorder.action(1, number // 47, "0SEND_F0", begin_ns, begin_ns)
            times_us.append((now_ns() - begin_ns) / 1e3)
        os.close(events_fd)
        os.close(steps_fd)
    return [
        limit_row("an action", f"time to record it, p{100 * part:g} us", times_us, part, _ACTION_US)
        for part in (0.5, 0.95)
    ]
