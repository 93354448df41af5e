"""The start of a run: the files of its records, its workers, the guard of their transfers, and their first messages.

How long workers may take is decided in `core/protocol/transitions.py`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from engine.core.checkpoint_rules import Resumption
from engine.core.faults.fault import Fault, to_plain
from engine.core.history.process_records import HostRecord, PairsRecord, StartedRecord
from engine.core.history.run_records import AGENT, VERSION, JobRecord
from engine.core.history.step_files import FOLDER, span_of
from engine.core.job.job import Job, parse_size
from engine.core.messages import WelcomeMessage
from engine.core.ownership import Ownership
from engine.files.accelerators import accelerators, lacks
from engine.files.run_folder import RunFolder
from engine.runtime.agent.keeper import place_of
from engine.runtime.agent.run_state import InheritedRun
from engine.runtime.agent.scribe import Scribe
from engine.runtime.agent.worker_handles import WorkerHandle, close_workers, free_rank, start_worker
from engine.runtime.process.kernel import allow_files, new_network
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import LogRetention, Recorder, RecordListener, StepWriter, open_events, open_steps
from engine.runtime.process.spawner import Spawner


def recording(
    stack: contextlib.ExitStack,
    events: Path,
    job: Job,
    injectable: bool,
    host: HostRecord | None,
    server: Spawner | None = None,
    scribe: Scribe | None = None,
    is_new: bool = True,
) -> tuple[Recorder, tuple[int, int]]:
    """Opens the files of a run's records; returns the recorder, and descriptors for the workers.

    New files begin with the job and the host, if given. A `server` hears of records; without a `scribe` this process
    waits.
    """
    tell = None if server is None else server.hear
    recorder, record_fds = (_opened if scribe is None else scribe.recorder)(events, job, tell)
    for fd in record_fds:
        stack.callback(os.close, fd)
    stack.callback(recorder.close)
    if server is not None:
        server.records_in(events.parent)
    if not is_new:
        return recorder, record_fds
    recorder.write(JobRecord(version=VERSION, job=job, injectable=injectable))
    if host is not None:
        recorder.write(host)
    return recorder, record_fds


def _opened(events: Path, job: Job, tell: RecordListener | None) -> tuple[Recorder, tuple[int, int]]:
    events_fd, steps_fd = open_events(events), open_steps(events.parent / FOLDER)
    span, limit = span_of(job), parse_size(job.events_max)
    thinning = LogRetention(steps_fd, events_fd, span, limit) if limit else None
    return Recorder(events_fd, AGENT, StepWriter(steps_fd, None, span), thinning, tell=tell), (events_fd, steps_fd)


_FILES, _FILES_PER_WORKER = 256, 8  # that this process may have open: of a worker its link, pidfd and accounts


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """All that workers of a run start with, until `stack` ends them; `numbers` are of all that were ever started."""

    stack: contextlib.ExitStack
    server: Spawner
    job: Job
    ownership: Ownership
    ranks: tuple[int, ...]
    recorder: Recorder
    record_fds: tuple[int, int]
    logs: Path
    folder: str = ""
    faults: Sequence[Fault] = ()
    numbers: set[int] = field(default_factory=set)

    def start(self, faults: Sequence[Fault], origin: Resumption | None) -> WorkerGroup:
        """Starts owners and waiting workers; with an `origin` they begin after that checkpoint."""
        board = ProgressBoard.create(max(self.ownership.workers()) + 1 + self.job.standby)
        self.stack.callback(board.close)
        network_fds = _network_of_nccl(self.stack, self.recorder, self.job)
        crew = WorkerGroup(self, board, network_fds, self._welcome(faults, origin), {})
        self.stack.callback(close_workers, crew.members)
        allow_files(_FILES + _FILES_PER_WORKER * board.num_lines)
        with self.server.forking():
            for worker in self.ownership.workers():
                crew.start(worker)
            for _ in range(self.job.standby):
                crew.start_waiting()
        for member in crew.members.values():
            crew.welcome(member)
        return crew

    def take_over(self, inherited: InheritedRun, origin: Resumption | None) -> WorkerGroup:
        """Returns the workers of a run that another host has coordinated; they go on."""
        workers = [each.worker for each in inherited.processes]
        board = ProgressBoard.create(max(workers, default=0) + 1)
        self.stack.callback(board.close)
        struck = inherited.faults.struck
        waiting = tuple(each for each in self.faults if each.id not in struck)
        welcome = next(iter(inherited.welcomes.values()), self._welcome((), origin))  # none is there if no worker lives
        welcome = replace(welcome, faults=tuple(map(to_plain, waiting)))
        crew = WorkerGroup(self, board, (), welcome, {}, inherited.last)
        self.stack.callback(close_workers, crew.members)
        self.numbers.update(workers)
        for process in inherited.processes:
            log = self.logs / f"worker-{process.worker}.log"
            member = WorkerHandle(process.worker, (), *process.adopt(), log, "running", host=process.host)
            member.local_rank = inherited.welcomes.get(process.worker, welcome).local_rank
            crew.members[process.worker] = member
        return crew

    def _welcome(self, faults: Sequence[Fault], origin: Resumption | None) -> WelcomeMessage:
        """Returns the first message to the workers of a start, as far as it is the same for all."""
        return WelcomeMessage(
            worker=0,
            job=asdict(self.job),
            owners=self.ownership.owners,
            shadows=self.ownership.shadows,
            ranks=self.ranks,
            num_lines=0,
            faults=tuple(map(to_plain, faults)),
            start=secrets.token_hex(8),
            network=self.server.network,
            checkpoints=place_of(self.job, self.folder),
            run=Path(self.folder).absolute().name,
            checkpoint=None if origin is None else asdict(origin),
            outputs=str(RunFolder(Path(self.folder).absolute()).outputs) if self.job.predict_args else "",
        )


@dataclass(frozen=True, slots=True)
class WorkerGroup:
    """The workers since the last start, and what starts one more: the `greeting`, and `last`, the greatest number."""

    launch: LaunchSpec
    board: ProgressBoard
    network_fds: tuple[int, ...]
    greeting: WelcomeMessage
    members: dict[int, WorkerHandle]
    last: int = -1

    def start(self, worker: int) -> WorkerHandle:
        """Starts the process of a worker, which waits for its welcome."""
        launch = self.launch
        fds = (*launch.record_fds, self.board.fd, *self.network_fds)
        self.board.grow(worker + 1)
        launch.numbers.add(worker)
        rank = free_rank(self.members.values(), launch.server.at(worker).host)
        self.members[worker] = member = start_worker(
            launch.server, worker, launch.ownership, fds, self.board, launch.logs
        )
        member.local_rank = rank
        return member

    def start_waiting(self) -> WorkerHandle:
        """Starts a worker that will wait, with a number that no worker has had since the last start; at any time."""
        return self.start(max((self.last, *self.members)) + 1)

    def lacks_gpu(self) -> str:
        """Returns why one more worker of this host would have no GPU; empty if it needs none, or gets one."""
        job = self.launch.job
        if job.device != "cuda" or job.share_gpu or self.launch.server.host:
            return ""
        return lacks(job, accelerators(), sum(each.exit_code is None for each in self.members.values()) + 1)

    def welcome(self, member: WorkerHandle, *, joins: bool = False) -> None:
        """Sends a worker its first message; one that owns nothing waits, with `joins` for no failure."""
        launch, owners = self.launch, self.greeting.owners
        launch.recorder.write(
            StartedRecord(of=member.worker, child=member.child.pid, slots=member.slots, node=member.host)
        )
        message = replace(
            self.greeting,
            worker=member.worker,
            num_lines=max(member.worker, *owners) + 1,
            waits=member.worker not in owners,
            joins=joins,
            address=launch.server.at(member.worker).address,
            local_rank=member.local_rank,
            host=member.host,
        )
        member.link.send(message)


def _network_of_nccl(stack: contextlib.ExitStack, recorder: Recorder, job: Job) -> tuple[int, ...]:
    """Returns the descriptor of a network of this run alone, for the sockets of NCCL, where the kernel makes one."""
    if job.backend != "nccl":
        return ()
    try:
        network = new_network()
    except OSError as error:
        recorder.write(PairsRecord(guard="none", why=str(error)))
        return ()
    stack.callback(os.close, network)
    recorder.write(PairsRecord(guard="namespace", why=""))
    return (network,)
