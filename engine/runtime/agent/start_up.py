"""The start of a run: the files of its records, its workers, the guard of their transfers, and their first messages."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from engine.core.checkpoints.resumption import Resumption
from engine.core.config.job import Job
from engine.core.config.size import parse_size
from engine.core.faults.fault import Fault, to_plain
from engine.core.history.process_records import HostRecord, PairsRecord, StartedRecord
from engine.core.history.record import AGENT, VERSION
from engine.core.history.run_records import JobRecord
from engine.core.history.step_files import FOLDER, span_of
from engine.core.messages import WelcomeMessage
from engine.core.ownership import Ownership
from engine.runtime.agent.worker_handles import WorkerHandle, close_workers, start_workers
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, open_events
from engine.runtime.ipc.step_writer import StepWriter, open_steps
from engine.runtime.ipc.thinning import Thinning
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.network_namespace import new_network


class Guard(NamedTuple):
    """The guard of the transfers between workers: the descriptor of a namespace, or a key."""

    fds: tuple[int, ...] = ()
    key: str = ""


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


@dataclass(frozen=True, slots=True)
class Launch:
    """All that the workers of a run are started with; `stack` ends them. `ranks` orders the process group.

    `checkpoints` is the place for them, empty if the job keeps none.
    """

    stack: contextlib.ExitStack
    server: ForkServer
    job: Job
    ownership: Ownership
    ranks: tuple[int, ...]
    recorder: Recorder
    record_fds: tuple[int, int]
    logs: Path
    checkpoints: str = ""

    def start(
        self, faults: Sequence[Fault], origin: Resumption | None
    ) -> tuple[ProgressBoard, dict[int, WorkerHandle]]:
        """Starts the workers and sends each its first message; with an `origin` they begin after that checkpoint."""
        board = ProgressBoard.create(max(self.ownership.workers()) + 1)
        self.stack.callback(board.close)
        guard = _guard(self.stack, self.recorder)
        members = start_workers(self.server, self.ownership, self.record_fds, board, self.logs, guard.fds)
        self.stack.callback(close_workers, list(members.values()))
        for member in members.values():
            self._welcome(member, faults, guard, origin)
        return board, members

    def _welcome(self, member: WorkerHandle, faults: Sequence[Fault], guard: Guard, origin: Resumption | None) -> None:
        self.recorder.write(StartedRecord(of=member.worker, child=member.child.pid, slots=member.slots))
        message = WelcomeMessage(
            worker=member.worker,
            job=asdict(self.job),
            owners=self.ownership.owners,
            shadows=self.ownership.shadows,
            ranks=self.ranks,
            num_lines=max(self.ownership.workers()) + 1,
            faults=tuple(to_plain(fault) for fault in faults),
            pair_key=guard.key,
            checkpoints=self.checkpoints,
            run=self.logs.absolute().parent.name,
            checkpoint=None if origin is None else asdict(origin),
        )
        member.link.send(message)


def _guard(stack: contextlib.ExitStack, recorder: Recorder) -> Guard:
    """Returns the guard of this run's transfers: a network namespace where the kernel makes one, else a key."""
    try:
        network = new_network()
    except OSError as error:
        recorder.write(PairsRecord(guard="proof", why=str(error)))
        return Guard(key=secrets.token_hex(32))
    stack.callback(os.close, network)
    recorder.write(PairsRecord(guard="namespace", why=""))
    return Guard((network,))
