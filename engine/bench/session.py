"""The launcher's side of the pipeline benchmark: starts the workers of a case and gathers their stamps."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.bench.figures.costs import Done, Iteration, lasting, predicted_seconds
from engine.bench.figures.rows import Row, Stamps, pipeline_rows, schedule_rows, seconds_taken
from engine.bench.figures.schedules import peer_name, predicted_by_sleeps, timed_job, timed_program
from engine.core.action import parse_action
from engine.core.config.job import Job
from engine.core.config.job_wants import fresh_ownership
from engine.core.errors import WorkerFailedError
from engine.core.scalar import Args
from engine.core.schedules.registry import SCHEDULES
from engine.runtime.agent.worker_handles import Member, RendezvousStore, close_members, start_members
from engine.runtime.ipc.link import Message
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import open_events
from engine.runtime.process.children import ForkServer

SIDES = ("ours", "peer")
_EVENTS = "events.jsonl"
_SHAPES = ((4, 8), (8, 16), (4, 32))  # P, M
_BLOCKS: Args = {"width": 256, "depth": 6}

Taken = dict[str, list[tuple[Stamps, ...]]]  # side -> its iterations, each with the stamps of every worker


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
    with tempfile.TemporaryDirectory(dir=folder) as name:
        taken = _measure(job, num_iterations, Path(name), SIDES)
    return pipeline_rows(case, *(taken[side] for side in SIDES))


def bench_schedule(case: str, job: Job, num_iterations: int, folder: Path) -> list[Row]:
    """Measures one schedule as `bench_pipeline` does; returns its rows beside two dry runs and torch's schedule."""
    with tempfile.TemporaryDirectory(dir=folder) as name:
        taken = _measure(job, num_iterations, Path(name), (*SIDES, "lone"))
        done = _all_done(Path(name))
    ours = taken["ours"]
    judged, lone = ([_done_within(done, workers) for workers in taken[side]] for side in ("ours", "lone"))
    ownership = fresh_ownership(job)
    program, overlaps = timed_program(job, ownership), SCHEDULES[job.schedule].overlaps
    return schedule_rows(
        case,
        [seconds_taken(workers) for workers in ours],
        [predicted_seconds(program, ownership, *both, overlaps) for both in zip(judged, lone, strict=True)],
        [predicted_by_sleeps(program, ownership, workers, overlaps) for workers in ours],
        peer_name(job.schedule),
        [seconds_taken(workers) for workers in taken["peer"]],
        has_goal=not overlaps,
    )


def _all_done(folder: Path) -> dict[int, list[Done]]:
    """Returns all that our executor ran on each worker, in order of the ends."""
    done: dict[int, list[Done]] = {}
    for line in (folder / _EVENTS).read_text().splitlines():
        record = json.loads(line)
        if record["event"] == "action":
            each = Done(parse_action(record["action"]), record["start_ns"], record["end_ns"])
            done.setdefault(record["worker"], []).append(each)
    return done


def _done_within(done: Mapping[int, Sequence[Done]], workers: Sequence[Stamps]) -> Iteration:
    """Returns what was done in one iteration."""
    return {
        worker: lasting([each for each in done[worker] if start_ns <= each.start_ns < end_ns], end_ns)
        for worker, (start_ns, end_ns) in enumerate((stamps.start_ns, stamps.end_ns) for stamps in workers)
    }


def _measure(job: Job, num_iterations: int, folder: Path, sides: Sequence[str]) -> Taken:
    """Returns what each side took, iteration by iteration."""
    ownership = fresh_ownership(job)
    num_workers = len(ownership.workers())
    with contextlib.ExitStack() as stack:
        events_fd = open_events(folder / _EVENTS)
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
                sides=sides,
                iterations=num_iterations,
                temporary=str(folder),
            )
        taken = _gather(members, sides)
        _send_all(members, "bye")
    return {side: list(zip(*(taken[side, worker] for worker in members), strict=True)) for side in sides}


def _send_all(members: dict[int, Member], kind: str, **fields: Any) -> None:
    for member in members.values():
        member.link.send(kind, **fields)


def _gather(members: dict[int, Member], sides: Sequence[str]) -> dict[tuple[str, int], list[Stamps]]:
    """Serves the workers as the agent would, until all have told their stamps; returns those of (side, worker)."""
    taken: dict[tuple[str, int], list[Stamps]] = {(side, worker): [] for side in sides for worker in members}
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
