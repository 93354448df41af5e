"""The launcher of the pipeline benchmark, and the workers of benchmarks: starts and serves them."""

from __future__ import annotations

import contextlib
import os
import selectors
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path

from engine.bench.figures import (
    REMARKS,
    SIDES,
    TORCH_NAMES,
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
from engine.core.history.step_files import FOLDER
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership
from engine.core.message_kinds import Message
from engine.core.messages import (
    BorderMessage,
    BordersMessage,
    ByeMessage,
    CutMessage,
    FinishedMessage,
    KeyMessage,
    LinkWantedMessage,
    PartitionMessage,
    WelcomeMessage,
)
from engine.core.ownership import Ownership
from engine.core.protocol.coordinator_state import Borders
from engine.core.units import Args
from engine.runtime.agent.worker_handles import WorkerHandle, close_workers, start_workers, tell_all
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.link import Link, LinkPairs
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import open_events, open_steps

_PLAIN = ("1f1b", "eager-1f1b", "gpipe")  # one stage per worker: their ideal time is known
_GOALS_OF_TORCH = {"eager-1f1b": 0.97}  # on stages that sleep: torch's waits for each transfer
_SHAPES = ((4, 8), (8, 16), (4, 32), (16, 32))  # P, M
_BLOCKS: Args = {"width": 256, "depth": 6}


def pipeline_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench pipeline`: schedules with a peer in torch, on sleeping stages or a model."""
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
    for schedule in (name for name in TORCH_NAMES if name not in _PLAIN):
        job = schedule_job(schedule)
        v = job.stages_per_worker
        jobs[f"{schedule} timed P={job.stages // v} V={v} M={job.microbatches}"] = job
    return jobs


def bench_pipeline(case: str, job: Job, num_iterations: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of one case; `folder` is for the temporary files of its workers.

    Raises WorkerFailedError if a worker ends before it has finished.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        ours, peer = _measure(job, num_iterations, Path(name))
    has_ideal = job.model == "timed" and job.schedule in _PLAIN
    goal = _GOALS_OF_TORCH.get(job.schedule) if has_ideal else None
    return pipeline_rows(case, ours, peer, REMARKS.get(job.schedule, ""), has_ideal, goal)


def _measure(job: Job, num_iterations: int, folder: Path) -> list[list[tuple[Stamps, ...]]]:
    """Returns the iterations of each side, each with the stamps of every worker."""
    ownership = fresh_ownership(job)
    with bench_workers(ownership, folder, "bench-pipeline") as members:
        for worker, member in members.items():
            member.link.send(Turns(num_iterations, str(folder)))
            welcome = WelcomeMessage(
                worker=worker,
                job=asdict(job),
                owners=ownership.owners,
                shadows=ownership.shadows,
                ranks=ownership.workers(),
                num_lines=len(members),
                faults=(),
            )
            member.link.send(welcome)
        stamps: dict[tuple[str, int], list[Stamps]] = {(side, worker): [] for side in SIDES for worker in members}
        working, messages = set(members), served(members)
        while working:
            worker, message = next(messages)
            if isinstance(message, CodecTimes):
                stamps[message.side, worker].append(message.stamps)
            elif isinstance(message, FinishedMessage):
                working.remove(worker)
    return [list(zip(*(stamps[side, worker] for worker in members), strict=True)) for side in SIDES]


@contextlib.contextmanager
def bench_workers(ownership: Ownership, folder: Path, role: str) -> Iterator[dict[int, WorkerHandle]]:
    """Runs the workers of a benchmark during the block; `folder` is for their files."""
    with contextlib.ExitStack() as stack:
        fds = (open_events(folder / "events.jsonl"), open_steps(folder / FOLDER))
        for fd in fds:
            stack.callback(os.close, fd)
        server = stack.enter_context(ForkServer())
        board = ProgressBoard.create(len(ownership.workers()))
        stack.callback(board.close)
        members = start_workers(server, ownership, fds, board, folder, role=role)
        stack.callback(close_workers, members)
        yield members
        tell_all(members.values(), ByeMessage())


def served(members: dict[int, WorkerHandle]) -> Iterator[tuple[int, Message]]:
    """Serves workers as the agent would; yields all other messages, each with its worker."""
    pairs, borders = LinkPairs(members.get), Borders()
    with selectors.DefaultSelector() as selector:
        for member in members.values():
            if isinstance(member.link, Link):
                selector.register(member.link, selectors.EVENT_READ, (member, member.link))
        while True:
            for key, _ in selector.select():
                member, link = key.data
                match message := link.receive():
                    case None:
                        log = member.log.read_text()
                        raise WorkerFailedError(f"worker {member.worker} of the benchmark ended:\n{log}")
                    case CutMessage():
                        tell_all(members.values(), PartitionMessage(message.starts))
                    case LinkWantedMessage():
                        pairs.link(member, message)
                    case BorderMessage():
                        before, borders = borders, borders.learn(message)
                        if borders.known != before.known:
                            tell_all(members.values(), BordersMessage(borders.known))
                    case KeyMessage():
                        tell_all(members.values(), message)
                    case _:
                        yield member.worker, message
