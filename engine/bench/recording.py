"""The recording benchmark: steps of which every action is recorded, beside steps of the same run of which none is.

Two steps are recorded and two are not, in turns; the first of each two is not timed, because what a step leaves behind
is recorded in the next. A step is timed by the agent's commits. Where the machine has other work, what it takes to
write the records of the busiest worker's step says more: it is measured apart from the run.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from engine.bench.figures.interval import median_interval
from engine.bench.figures.rows import Row
from engine.core.config.job import Job
from engine.core.errors import BambooError, ExitCode
from engine.runtime.agent.session import run_session
from engine.runtime.ipc.recorder import Recorder, open_events
from engine.runtime.process.children import Child, ForkServer

_GOAL = 1.01
_ROLE = "bench-recording"
_NUM_WARM_UP = 1  # pairs
_NUM_RECORDS = 10_000


def recording_jobs() -> dict[str, Job]:
    """Returns the cases, name -> job: real compute, and stages that sleep."""
    job = Job(validate_every=0, audit=0, warmup_steps=0)
    timed = replace(job, model="timed", model_args={"layers": 4, "width": 256}, data_args={"features": 256})
    return {"gpt P=4 M=8": job, "timed P=4 M=8": timed}


def bench_recording(case: str, job: Job, num_pairs: int, folder: Path) -> list[Row]:
    """Measures the steps of one case with their actions recorded, beside those without.

    Raises:
        BambooError: the run did not come to its end.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name, _Server() as server:
        events = Path(name) / "events.jsonl"
        ending = run_session(replace(job, steps=4 * (_NUM_WARM_UP + num_pairs)), events, Path(name), server=server)
        if ending.exit_code:
            error = BambooError(str(ending.error or ending.outcome))
            error.exit_code = ExitCode(ending.exit_code)
            raise error
        records = [json.loads(line) for line in events.read_text().splitlines()]
        record_s = _record_seconds(Path(name) / "records")
    recorded_s, unrecorded_s = _in_pairs([each["at_ns"] for each in records if each["event"] == "commit"])
    actions = Counter((each["worker"], each["step"]) for each in records if each["event"] == "action")
    records_s, step_s = max(actions.values()) * record_s, median(unrecorded_s)
    share, most = records_s / step_s, _GOAL - 1
    found = median_interval([one / other for one, other in zip(recorded_s, unrecorded_s, strict=True)])
    figures, metric = (median(recorded_s), step_s), "step s, beside one unrecorded"
    return [
        Row(case, metric, *figures, found.median, None, None, num_pairs),
        Row(case, f"{metric}, low end of 95 %", *figures, found.low, _GOAL, found.low <= _GOAL, num_pairs),
        Row(case, "records s, beside the step", records_s, step_s, share, most, share <= most, _NUM_RECORDS),
    ]


def _record_seconds(path: Path) -> float:
    """Returns the seconds that one record takes."""
    fd = open_events(path)
    recorder = Recorder(fd, 0)
    started_s = time.monotonic()
    for step in range(_NUM_RECORDS):
        recorder.action(1, step, "3RECV_F7", 10**15, 10**15)
    taken_s = time.monotonic() - started_s
    os.close(fd)
    return taken_s / _NUM_RECORDS


def _in_pairs(commits_ns: Sequence[int]) -> tuple[list[float], list[float]]:
    """Returns the seconds of recorded steps and of those that are not, pair by pair."""
    seconds = [(commits_ns[step] - commits_ns[step - 1]) / 1e9 for step in range(1, len(commits_ns), 2)]
    return seconds[2 * _NUM_WARM_UP :: 2], seconds[2 * _NUM_WARM_UP + 1 :: 2]


class _Server(ForkServer):
    """Starts workers that record every other two steps."""

    def fork(self, role: str, name: str, log_fd: int, fds: Sequence[int] = ()) -> Child:
        """Forks a child, as the usual fork server does."""
        return super().fork(_ROLE if role == "worker" else role, name, log_fd, fds)


def main(control_fd: int, events_fd: int, board_fd: int) -> int:
    """Runs one worker like any other, but for what it records; returns its exit code."""
    from engine.runtime.worker import worker

    Recorder.action = _record_some  # type: ignore[assignment, method-assign]  # in this process, which is the benchmark's own
    return worker.main(control_fd, events_fd, board_fd)


_record = Recorder.action


def _record_some(recorder: Recorder, epoch: int, step: int, action: str, start_ns: int, end_ns: int) -> None:
    if step // 2 % 2 == 0:
        _record(recorder, epoch, step, action, start_ns, end_ns)
