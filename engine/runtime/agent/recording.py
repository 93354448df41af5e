"""Opens the files of a run's records: the events, and the actions and hashes by steps."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path

from engine.core.config.job import Job
from engine.core.config.size import parse_size
from engine.core.history.process_records import HostRecord
from engine.core.history.record import AGENT, VERSION
from engine.core.history.run_records import JobRecord
from engine.core.history.step_files import FOLDER, span_of
from engine.runtime.ipc.recorder import Recorder, open_events
from engine.runtime.ipc.step_writer import StepWriter, open_steps
from engine.runtime.ipc.thinning import Thinning


def recording(
    stack: contextlib.ExitStack,
    events: Path,
    job: Job,
    injectable: bool,
    workers: Collection[int],
    host: HostRecord | None,
) -> tuple[Recorder, tuple[int, int]]:
    """Opens the files of a run's records, and returns their descriptors for the workers.

    The first record is the job, the second one the host if it is given.
    """
    events_fd, steps_fd = record_fds = open_events(events), open_steps(events.parent / FOLDER)
    for fd in record_fds:
        stack.callback(os.close, fd)
    span, limit = span_of(job), parse_size(job.events_max)
    thinning = Thinning(steps_fd, events_fd, workers, span, limit) if limit else None
    recorder = Recorder(events_fd, AGENT, StepWriter(steps_fd, None, span), thinning)
    stack.callback(recorder.close)
    recorder.write(JobRecord(version=VERSION, job=job, injectable=injectable))
    if host is not None:
        recorder.write(host)
    return recorder, record_fds
