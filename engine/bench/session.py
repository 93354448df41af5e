"""The launcher of the pipeline benchmark: starts the workers of a case and gathers their stamps."""

from __future__ import annotations

import contextlib
import os
import selectors
import tempfile
from dataclasses import asdict
from functools import partial
from pathlib import Path

from engine.bench.figures import (
    REMARKS,
    SIDES,
    BenchRow,
    Cases,
    CodecTimes,
    Stamps,
    Turns,
    pipeline_rows,
    schedule_job,
    timed_job,
)
from engine.core.errors import WorkerFailedError
from engine.core.history.record_lines import FOLDER
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership
from engine.core.messages import (
    BorderMessage,
    ByeMessage,
    CutMessage,
    FinishedMessage,
    KeyMessage,
    LinkWantedMessage,
    PartitionMessage,
    WelcomeMessage,
)
from engine.core.program.schedules import SCHEDULES
from engine.core.units import Args
from engine.runtime.agent.worker_handles import WorkerHandle, close_workers, start_workers, tell_all
from engine.runtime.ipc.link import LinkPairs
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import open_events, open_steps
from engine.runtime.process.fork_client import ForkServer

_PLAIN = ("1f1b", "eager-1f1b", "gpipe")  # one stage per worker: their ideal time is known
_GOALS_OF_TORCH = {"eager-1f1b": 0.97}  # on stages that sleep: torch's waits for each transfer
_SHAPES = ((4, 8), (8, 16), (4, 32))  # P, M
_BLOCKS: Args = {"width": 256, "depth": 6}


def pipeline_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench pipeline`: each schedule on sleeping stages, the plain ones on a model too."""
    return {name: partial(bench_pipeline, name, job, 3 if quick else 20) for name, job in pipeline_jobs().items()}


def pipeline_jobs() -> dict[str, Job]:
    """Returns the jobs by the names of their cases."""
    jobs = {}
    for schedule in _PLAIN:
        for stages, microbatches in _SHAPES:
            jobs[f"{schedule} timed P={stages} M={microbatches}"] = timed_job(schedule, stages, microbatches)
        jobs[f"{schedule} gpt P=2 M=8"] = Job(
            model="gpt", model_args=_BLOCKS, stages=2, schedule=schedule, redundancy="none"
        )
    for schedule in (name for name in SCHEDULES if name not in _PLAIN):
        job = schedule_job(schedule)
        v = job.stages_per_worker
        jobs[f"{schedule} timed P={job.stages // v} V={v} M={job.microbatches}"] = job
    return jobs


def bench_pipeline(case: str, job: Job, num_iterations: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of one case; `folder` holds the temporary files of its workers.

    Raises:
        WorkerFailedError: a worker ended before it had finished.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        ours, peer = _measure(job, num_iterations, Path(name))
    has_ideal = job.model == "timed" and job.schedule in _PLAIN
    goal = _GOALS_OF_TORCH.get(job.schedule) if has_ideal else None
    return pipeline_rows(case, ours, peer, REMARKS.get(job.schedule, ""), has_ideal, goal)


def _measure(job: Job, num_iterations: int, folder: Path) -> list[list[tuple[Stamps, ...]]]:
    """Returns for each side its iterations, each with the stamps of every worker."""
    ownership = fresh_ownership(job)
    num_workers = len(ownership.workers())
    with contextlib.ExitStack() as stack:
        events_fd = open_events(folder / "events.jsonl")
        stack.callback(os.close, events_fd)
        steps_fd = open_steps(folder / FOLDER)
        stack.callback(os.close, steps_fd)
        server = stack.enter_context(ForkServer())
        board = ProgressBoard.create(num_workers)
        stack.callback(board.close)
        members = start_workers(server, ownership, (events_fd, steps_fd), board, folder, role="bench-pipeline")
        stack.callback(close_workers, members)
        for worker, member in members.items():
            member.link.send(Turns(num_iterations, str(folder)))
            welcome = WelcomeMessage(
                worker=worker,
                job=asdict(job),
                owners=ownership.owners,
                shadows=ownership.shadows,
                ranks=ownership.workers(),
                num_lines=num_workers,
                faults=(),
            )
            member.link.send(welcome)
        taken = _gather(members)
        tell_all(members.values(), ByeMessage())
    return [list(zip(*(taken[side, worker] for worker in members), strict=True)) for side in SIDES]


def _gather(members: dict[int, WorkerHandle]) -> dict[tuple[str, int], list[Stamps]]:
    """Serves the workers as the agent would, until all have sent their stamps; returns the stamps by (side, worker)."""
    taken: dict[tuple[str, int], list[Stamps]] = {(side, worker): [] for side in SIDES for worker in members}
    working, pairs = set(members), LinkPairs(members.get)
    with selectors.DefaultSelector() as selector:
        for member in members.values():
            selector.register(member.link, selectors.EVENT_READ, member)
        while working:
            for key, _ in selector.select():
                member = key.data
                message = member.link.receive()
                if message is None:
                    raise WorkerFailedError(f"worker {member.worker} of the benchmark ended:\n{member.log.read_text()}")
                match message:
                    case CodecTimes():
                        taken[message.side, member.worker].append(message.stamps)
                    case FinishedMessage():
                        working.remove(member.worker)
                    case CutMessage():
                        tell_all(members.values(), PartitionMessage(message.starts))
                    case LinkWantedMessage():
                        pairs.link(member, message)
                    case BorderMessage() | KeyMessage():
                        tell_all(members.values(), message)
    return taken
