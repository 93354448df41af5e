"""The launcher's side of the pipeline benchmark: starts the workers of a case and gathers their stamps."""

from __future__ import annotations

import contextlib
import os
import selectors
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.core.bench_rows import Row, Stamps, pipeline_rows, schedule_rows, seconds_taken
from engine.core.bench_schedules import peer_name, predicted_seconds, timed_job, timed_program
from engine.core.errors import WorkerFailedError
from engine.core.job import Args, Job
from engine.core.planned import fresh_ownership
from engine.runtime.children import ForkServer
from engine.runtime.link import Message
from engine.runtime.progress_board import ProgressBoard
from engine.runtime.recorder import open_events
from engine.runtime.roster import Member, RendezvousStore, close_members, start_members

SIDES = ("ours", "peer")
_SHAPES = ((4, 8), (8, 16), (4, 32))  # P, M
_BLOCKS: Args = {"width": 256, "depth": 6}

Taken = dict[tuple[str, int], list[Stamps]]  # (side, worker) -> its iterations
Iterations = list[tuple[Stamps, ...]]  # of one side: the stamps of every worker


def pipeline_jobs() -> dict[str, Job]:
    """Returns the cases, name -> job: timed stages in several shapes and real compute, each under both schedules."""
    jobs = {}
    for schedule in ("1f1b", "gpipe"):
        for stages, microbatches in _SHAPES:
            jobs[f"{schedule} timed P={stages} M={microbatches}"] = timed_job(schedule, stages, microbatches)
        jobs[f"{schedule} gpt P=2 M=8"] = Job(
            model="gpt", model_args=_BLOCKS, stages=2, schedule=schedule, redundancy="none"
        )
    return jobs


def bench_pipeline(case: str, job: Job, num_iterations: int, folder: Path) -> list[Row]:
    """Measures one case and returns its rows; what the workers write meanwhile lies in `folder` until the end.

    Raises:
        WorkerFailedError: a worker ended before it had finished.
    """
    return pipeline_rows(case, *_iterations(job, num_iterations, folder))


def bench_schedule(case: str, job: Job, num_iterations: int, folder: Path) -> list[Row]:
    """Measures one schedule as `bench_pipeline` does, and returns its rows beside its dry run and torch's schedule."""
    ours, peer = _iterations(job, num_iterations, folder)
    ownership = fresh_ownership(job)
    program = timed_program(job, ownership)
    predicted = [predicted_seconds(program, ownership, workers) for workers in ours]
    ours_s, peer_s = ([seconds_taken(workers) for workers in side] for side in (ours, peer))
    return schedule_rows(case, peer_name(job.schedule), ours_s, predicted, peer_s)


def _iterations(job: Job, num_iterations: int, folder: Path) -> tuple[Iterations, Iterations]:
    """Returns what each side took, iteration by iteration."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        taken = _measure(job, num_iterations, Path(name))
    workers = fresh_ownership(job).workers()
    ours, peer = (list(zip(*(taken[side, worker] for worker in workers), strict=True)) for side in SIDES)
    return ours, peer


def _measure(job: Job, num_iterations: int, folder: Path) -> Taken:
    ownership = fresh_ownership(job)
    num_workers = len(ownership.workers())
    with contextlib.ExitStack() as stack:
        events_fd = open_events(folder / "events.jsonl")
        stack.callback(os.close, events_fd)
        server = stack.enter_context(ForkServer())
        board = ProgressBoard.create(num_workers)
        stack.callback(board.close)
        store = RendezvousStore(server, folder)
        stack.callback(store.close)
        members = start_members(server, ownership, events_fd, board, folder, role="bench-pipeline")
        stack.callback(close_members, list(members.values()))
        for worker, member in members.items():
            member.link.send(
                "welcome",
                worker=worker,
                job=asdict(job),
                owners=ownership.owners,
                shadows=ownership.shadows,
                faults=(),
                ranks=ownership.workers(),
                num_lines=num_workers,
                store_port=store.port,
                iterations=num_iterations,
                temporary=str(folder),
            )
        taken = _gather(members)
        _send_all(members, "bye")
    return taken


def _send_all(members: dict[int, Member], kind: str, **fields: Any) -> None:
    for member in members.values():
        member.link.send(kind, **fields)


def _gather(members: dict[int, Member]) -> Taken:
    """Serves the workers as the agent would, until all have told their stamps."""
    taken: Taken = {(side, worker): [] for side in SIDES for worker in members}
    working = set(members)
    with selectors.DefaultSelector() as selector:
        for member in members.values():
            selector.register(member.link, selectors.EVENT_READ, member)
        while working:
            for key, _ in selector.select():
                member = key.data
                message = member.link.receive()
                if message is None:
                    raise WorkerFailedError(f"worker {member.worker} of the benchmark ended:\n{member.log.read_text()}")
                if message["kind"] == "timed":
                    taken[message["side"], member.worker].append(_stamps(message))
                elif message["kind"] == "finished":
                    working.remove(member.worker)
                elif message["kind"] == "partition":
                    _send_all(members, "partition", starts=message["starts"])
                else:
                    _send_all(members, "border", stage=message["stage"], specs=message["specs"])
    return taken


def _stamps(message: Message) -> Stamps:
    sleeps = (tuple(message[name]) for name in ("forwards_ns", "backwards_ns"))
    return Stamps(message["start_ns"], message["end_ns"], *sleeps)
