"""The coordination benchmark: the times to tell all workers of an exit, to form a group and to start a private etcd.

Rules: the workers are processes; agent, event loop, coordinator and etcd are the same as in a run. There is no peer;
the second figure of a row is a limit.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine.bench.figures import BenchRow, Cases, Round, limit_row
from engine.codec.records import decoded
from engine.core.errors import WorkerFailedError
from engine.core.history.evidence import unlinked
from engine.core.history.process_records import ExitRecord
from engine.core.history.run_records import AGENT, MarkRecord, Record
from engine.core.history.step_files import FOLDER
from engine.core.hosts import ends
from engine.core.job.job import Job
from engine.core.ownership import Grid, fresh
from engine.core.protocol.coordinator_state import first_state
from engine.runtime.agent.agent import Agent, AgentTasks
from engine.runtime.agent.coordinator import Node, join_store
from engine.runtime.agent.session import supervise
from engine.runtime.agent.worker_handles import close_workers, start_workers
from engine.runtime.process.clock import now_ns
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import Interrupts, holding
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import Recorder, open_events, open_steps
from engine.runtime.store.embedded_etcd import EmbeddedEtcd

_VERDICT_S = 0.020
_FORM_S = 0.060
_ETCD_S = 0.3
_TOLD_NS = 60_000_000_000

Events = list[Record]


def coordination_cases(quick: bool) -> Cases:
    """Returns the cases of `bamboo bench coordination`."""
    return {
        "relay": partial(bench_relay, 5 if quick else 200),
        "forming": partial(bench_forming, 3 if quick else 20),
        "etcd start": partial(bench_etcd_start, 1 if quick else 20),
    }


def bench_relay(num_rounds: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of the times from an exit, as the agent sees it, to the verdict at all 7 workers left."""
    with _rounds(8, num_rounds, folder) as rounds:
        seconds = [_relay_s(events, _marks_ns(events, "told")) for events in rounds]
    case = "8 workers, one is killed"
    return [
        limit_row(case, f"exit seen to verdict told to all, p{100 * part:g} s", seconds, part, _VERDICT_S)
        for part in (0.5, 0.99)
    ]


def bench_forming(num_rounds: int, folder: Path) -> list[BenchRow]:
    """Returns the row of the time from the welcome of 4 workers until the last of them has joined the group."""
    with _rounds(4, num_rounds, folder) as rounds:
        seconds = [_forming_s(events) for events in rounds]
    return [limit_row("4 workers", "welcome to group formed, p95 s", seconds, 0.95, _FORM_S)]


def bench_etcd_start(num_times: int, folder: Path) -> list[BenchRow]:
    """Returns the rows of the time from the start of a private etcd until a run has won its role there."""
    seconds = [_etcd_start_s(folder) for _ in range(num_times)]
    return [
        limit_row("start of a run", f"etcd started to role won, p{100 * part:g} s", seconds, part, _ETCD_S)
        for part in (0.5, 0.95)
    ]


def _etcd_start_s(folder: Path) -> float:
    job = Job()
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        events_fd = open_events(own / "events.jsonl")
        stack.callback(os.close, events_fd)
        since_ns = now_ns()
        state = first_state(job, fresh(Grid(job.stages, job.microbatches)), now_ns())
        join_store(stack, None, "bench", own, state, Recorder(events_fd, AGENT))
        return (now_ns() - since_ns) / 1e9


class _Patient(Agent):
    """Lets the workers of a round tell their times, however busy the machine is."""

    def stop(self) -> None:
        """Stops every worker."""
        self.end_workers(ends.stop, _TOLD_NS)


@contextlib.contextmanager
def _rounds(num_workers: int, num_rounds: int, folder: Path) -> Iterator[Iterator[Events]]:
    """Yields an iterator that runs the rounds and gives the events of each; they share fork server and etcd."""
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder)))
        interrupts = stack.enter_context(holding())
        server = stack.enter_context(ForkServer())
        etcd = stack.enter_context(EmbeddedEtcd(own))
        from engine.runtime.store.etcd_kv import EtcdKV

        kv = EtcdKV(etcd.settings(), "/bamboo/bench/")
        stack.callback(kv.close)

        def rounds() -> Iterator[Events]:
            for number in range(num_rounds):
                agent = _round(number, num_workers, own, server, kv, interrupts)
                if agent.interrupted is not None:
                    sys.exit(128 + agent.interrupted)
                yield [decoded(unlinked(line)[0]) for line in (own / f"{number}.jsonl").read_text().splitlines()]

        yield rounds()


def _round(number: int, num_workers: int, folder: Path, server: ForkServer, kv: Any, interrupts: Interrupts) -> Agent:
    """Starts workers, of which one kills itself; serves them until all have ended."""
    job = Job(model="mlp", stages=num_workers, redundancy="none")  # a verdict ends a run without redundancy at once
    ownership = fresh(Grid(job.stages, job.microbatches))
    with contextlib.ExitStack() as stack:
        events_fd = open_events(folder / f"{number}.jsonl")
        stack.callback(os.close, events_fd)
        steps_fd = open_steps(folder / FOLDER)
        stack.callback(os.close, steps_fd)
        board = ProgressBoard.create(num_workers)
        stack.callback(board.close)
        members = start_workers(server, ownership, (events_fd, steps_fd), board, folder, role="bench-relay")
        stack.callback(close_workers, members)
        recorder = Recorder(events_fd, AGENT)
        node = Node(kv, first_state(job, ownership, now_ns()), now_ns())
        stack.callback(node.leave)
        for member in members.values():
            node.enrol(member.worker, member.child.pid, member.slots)
        agent = _Patient(job, members, recorder, node, AgentTasks())
        recorder.write(MarkRecord(phase="welcomed", epoch=0))
        for member in members.values():
            victim = number % num_workers
            member.link.send(Round(member.worker, ownership.workers(), victim))
        supervise(agent, server, interrupts)
    return agent


def _relay_s(events: Events, at_ns: Sequence[int]) -> float:
    """Returns the seconds from the victim's exit to the last of `at_ns`; raises if a worker that is left gave none."""
    (seen_ns,) = [event.seen_ns for event in events if isinstance(event, ExitRecord) and not event.expected]
    num_left = len(_marks_ns(events, "formed")) - 1
    if len(at_ns) != num_left:
        raise WorkerFailedError(f"{len(at_ns)} of {num_left} workers have said that they know of the exit")
    return (max(at_ns) - seen_ns) / 1e9


def _marks_ns(events: Events, phase: str) -> list[int]:
    return [event.at_ns for event in events if isinstance(event, MarkRecord) and event.phase == phase]


def _forming_s(events: Events) -> float:
    (welcomed_ns,) = _marks_ns(events, "welcomed")
    return (max(_marks_ns(events, "formed")) - welcomed_ns) / 1e9
