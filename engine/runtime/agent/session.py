"""A session: one job from start to end. It starts the processes, runs the agent and releases all resources."""

from __future__ import annotations

import contextlib
import secrets
import selectors
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Protocol

from engine.core.checkpoint_rules import Resumption, begun_with
from engine.core.errors import ExitCode, StorageError, required
from engine.core.faults.fault import Fault
from engine.core.history.process_records import (
    ForkServerEndedRecord,
    ForkServerRecord,
    HostRecord,
    InterruptRecord,
    ResumedRecord,
    TrainingEndedRecord,
)
from engine.core.history.run_records import LoadRecord
from engine.core.hosts.notice_answer import NoticeFrom
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership, shadowed
from engine.core.job.update_rules import preloads
from engine.core.message_kinds import Message
from engine.core.ownership import Ownership
from engine.core.protocol.coordinator_state import first_state
from engine.core.protocol.events import JobRestart, Takeover
from engine.core.protocol.inputs_outputs import JobResumption
from engine.core.protocol.wishes import MemoryLook, Rebalancing
from engine.core.protocol.worker_times import slow_workers
from engine.files.accelerators import GpuLook, refuse_what_this_host_lacks
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.coordinator import Node, join_store
from engine.runtime.agent.injector import FaultRequests
from engine.runtime.agent.keeper import keeper_for
from engine.runtime.agent.newcomers import ask, look_at_memory
from engine.runtime.agent.notice_source import NoticeSource, asked_for
from engine.runtime.agent.requests import JoinRequests, WorkerControls
from engine.runtime.agent.run_state import (
    NO_SEAT,
    Ending,
    FailoverContext,
    HandoverError,
    InheritedRun,
    RunState,
    RunView,
    ended,
    telling_unwritten,
    worker_view,
)
from engine.runtime.agent.start_up import LaunchSpec, WorkerGroup, recording
from engine.runtime.agent.worker_handles import WorkerHandle, give_slots
from engine.runtime.ipc.clock import TICK_S, now_ns
from engine.runtime.ipc.link import swept_of_nccl
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import Interrupts, RunInterruptedError, holding
from engine.runtime.store.etcd_settings import EtcdSettings

# The event loop of the agent: waits for workers' messages and exits, signals and the clock.


_PATIENCE_S = 0.05  # for the descendants of a worker: large ones end slowly, and the others wait for this loop


class Supervisor(Protocol):
    """The agent, as its event loop sees it."""

    members: dict[int, WorkerHandle]
    recorder: Recorder

    @property
    def due_s(self) -> float:
        """The time of the next deadline or late work."""

    def hear(self, member: WorkerHandle, message: Message) -> None:
        """Handles a message of a worker."""

    def sees_end(self, member: WorkerHandle) -> None:
        """Handles the sight of an end, before the last words of the worker."""

    def exited(self, member: WorkerHandle, code: int) -> None:
        """Handles the end of a worker, after its last words."""

    def interrupt(self, number: signal.Signals, step_grace_s: float) -> None:
        """Handles a signal to this process."""

    def look_at_deadlines(self) -> None:
        """Does the work that is due."""

    def look_at_clock(self) -> None:
        """Does the work of a tick."""

    def close(self) -> None:
        """Completes the records after the last end."""


def supervise(agent: Supervisor, server: ForkServer, interrupts: Interrupts) -> None:
    """Runs until every worker has ended or is left behind."""
    watched: set[int] = set()
    server_pid = _look_at(server, agent, 0)
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ, partial(_interrupted, agent, interrupts))
        ticked_s = 0.0
        while any(member.exit_code is None and not member.is_left_behind for member in agent.members.values()):
            for worker in agent.members.keys() - watched:  # at the start, and when one more was started
                _watch(selector, agent, agent.members[worker], server)
                watched.add(worker)
            wait_s = min(TICK_S, agent.due_s - time.monotonic())
            for key, _ in selector.select(max(0.0, wait_s)):
                # An earlier handler of this round may have unregistered this source, or have emptied it.
                if selector.get_map().get(key.fd) is key:
                    with contextlib.suppress(BlockingIOError):
                        key.data()
            agent.look_at_deadlines()
            now_s = time.monotonic()
            if now_s - ticked_s >= TICK_S:
                ticked_s = now_s
                agent.look_at_clock()
                server_pid = _look_at(server, agent, server_pid)
    agent.close()


def _interrupted(agent: Supervisor, interrupts: Interrupts) -> None:
    agent.interrupt(interrupts.take(), interrupts.step_grace_s)


def _watch(selector: selectors.BaseSelector, agent: Supervisor, member: WorkerHandle, server: ForkServer) -> None:
    def ended() -> None:
        agent.sees_end(member)
        _hear_last_words(agent, member)
        agent.exited(member, required(member.child.wait(), "a process whose pidfd is readable has ended"))
        for end in (member.link, member.child.pidfd):
            if end in selector.get_map():
                selector.unregister(end)
        member.release()
        server.end_descendants(_PATIENCE_S)

    def spoken() -> None:
        message = member.link.receive()
        if message is None:
            selector.unregister(member.link)
        else:
            agent.hear(member, message)

    selector.register(member.child.pidfd, selectors.EVENT_READ, ended)
    selector.register(member.link, selectors.EVENT_READ, spoken)


def _hear_last_words(agent: Supervisor, member: WorkerHandle) -> None:
    """Handles the remaining messages of a worker that has ended, before its exit is handled.

    A process that the worker has started may hold the link open; the link is then empty, but not at its end.
    """
    with contextlib.suppress(BlockingIOError):
        while (message := member.link.receive()) is not None:
            agent.hear(member, message)


def _look_at(server: ForkServer, agent: Supervisor, known: int) -> int:
    """Records the end of the `known` fork server and the start of another; returns the present pid, 0 for none."""
    now = 0 if server.has_ended() else server.pid
    if known not in (0, now):
        agent.recorder.write(ForkServerEndedRecord(child=known))
    if now not in (0, known):
        agent.recorder.write(ForkServerRecord(child=now))
    return now


_CALL_PATIENCE_S = 0.5  # from the end of an interrupted run's step until a call to the store is broken off

Watching = Callable[[RunView], None]


def run_session(
    job: Job,
    events: Path,
    logs: Path,
    watch: Watching = lambda view: None,
    *,
    run_id: str = "",
    etcd: EtcdSettings | None = None,
    ownership: Ownership | None = None,
    ranks: tuple[int, ...] | None = None,
    grace_s: float = 120.0,
    faults: Sequence[Fault] = (),
    injectable: bool = True,
    server: ForkServer | None = None,
    host: HostRecord | None = None,
    origin: Resumption | None = None,
    revive: Callable[[Agent], Resumption | None] = lambda agent: None,
    notices: NoticeFrom | None = None,
    seat: FailoverContext = NO_SEAT,
) -> Ending:
    """Runs a job. `events` is appended to; `watch` is called about four times a second in this thread.

    Without `etcd` it starts one. `ownership` assigns slots, `ranks` orders the group. Kills `grace_s` after a notice.
    Begins after `origin`, after a lost state as `revive` says; goes on with a run in `seat`. Raises BambooError.
    """
    started_at_ns, ownership = now_ns(), _first_ownership(job, ownership or fresh_ownership(job), server, seat)
    folder, ranks = str(seat.taken.home if seat.taken else events.parent), ranks or ownership.workers()
    first = first_state(job, ownership, now_ns(), begun_with(origin), server.later_ns if server else 0)
    with contextlib.ExitStack() as files, holding() as interrupts:
        recorder, record_fds = recording(files, events, job, injectable, host, server, seat.scribe, not seat.folder)
        try:
            with contextlib.ExitStack() as stack, interrupts.forcing(partial(_forced, recorder, stack)):
                (interrupts.let_wait if seat.taken else interrupts.check)()
                stack.enter_context(swept_of_nccl() if job.backend == "nccl" else contextlib.nullcontext())
                server = server or stack.enter_context(ForkServer())
                stack.enter_context(server.adopting(preloads(job)))
                node = join_store(stack, etcd, run_id or secrets.token_hex(4), logs, first, recorder, seat.lease)
                stack.enter_context(_renewing(node, server))
                launch = LaunchSpec(stack, server, job, ownership, ranks, recorder, record_fds, logs, folder, faults)
                requests = FaultRequests(events.parent, job, launch.numbers, recorder, injectable)
                keeper = stack.enter_context(keeper_for(server, job, folder, events.parent.name))
                made = partial(Agent, job, recorder=recorder, node=node, grace_s=grace_s, faults=faults, keeper=keeper)
                made = partial(made, revive=revive, own_host=server.host)
                look = partial(_Look, job, watch, requests, asked_for(stack, notices))
                agent, board = _trained(launch, made, look, partial(_supervise, server, interrupts), origin, seat.taken)
                return ended(recorder, _ending(agent, _view(agent, board), started_at_ns))
        except RunInterruptedError as error:
            return _broken_off(recorder, job, error, started_at_ns)


def _first_ownership(job: Job, given: Ownership, server: ForkServer | None, seat: FailoverContext) -> Ownership:
    if server is None or not server.host:  # each of several has done so before it came to the others
        refuse_what_this_host_lacks(job)
    return given if seat.taken else _on_hosts(job, given, server)


def _on_hosts(job: Job, ownership: Ownership, server: ForkServer | None) -> Ownership:
    """Deals the workers to the hosts that are there; returns the ownership with shadows on other hosts, if possible."""
    workers = ownership.workers()
    if server is not None:
        server.deal(workers)
    return shadowed(job, ownership, workers, {each: server.at(each).host for each in workers} if server else None)


@contextlib.contextmanager
def _renewing(node: Node, server: ForkServer) -> Iterator[None]:
    """Keeps the leases of this host while the fork server imports torch, for longer than a lease on a busy machine."""
    server.while_waiting = lambda: node.renew(now_ns())
    try:
        yield
    finally:
        server.while_waiting = lambda: None


def _broken_off(recorder: Recorder, job: Job, error: RunInterruptedError, started_at_ns: int) -> Ending:
    """Records and returns the end of a run that a signal has broken off before its agent was there."""
    recorder.write(InterruptRecord(signal=error.number.name))
    view = RunView(RunState(job), ())
    return ended(recorder, Ending("interrupted", error.exit_code, None, view, started_at_ns, now_ns()))


def _trained(
    launch: LaunchSpec,
    made: Callable[..., Agent],
    look: Callable[[WorkerGroup], _Look],
    run: Callable[[Agent], None],
    origin: Resumption | None,
    taken: InheritedRun | None,
) -> tuple[Agent, ProgressBoard]:
    """Starts workers and runs their agent, again while they are to be started again; returns the last agent.

    The first agent of a run that another host has begun takes over its workers.
    """
    agent: Agent | None = None
    while agent is None or agent.is_to_restart:
        if agent is not None:  # on the hosts that are left
            launch = replace(launch, ownership=_on_hosts(launch.job, launch.ownership, launch.server))
        left = launch.faults if agent is None else _restarted(agent, launch.ownership)
        is_taken = taken is not None and agent is None
        origin = origin if is_taken else _origin(launch.recorder, origin, agent)
        crew = launch.take_over(taken, origin) if taken and is_taken else launch.start(left, origin)
        board, at = crew.board, look(crew)
        agent = made(
            crew.members,
            tick=at.tick,
            on_joiners=partial(at.ask, takes_in=True),
            before=agent,
            board=board,
            begins=origin,
            results=taken.results if taken else None,
        )
        for member in crew.members.values():
            agent.node.enrol(member.worker, member.child.pid, member.slots, host=member.host)
        if taken and is_taken:
            agent.num_notices = taken.notices
            agent.newcomers.know(taken.place)
            agent.run_state.notes += agent.injector.take_over(taken.faults, taken.lost)
            give_slots(crew.members.values(), agent.node.coordination.ownership)
            agent.decide(Takeover(now_ns(), lost=taken.lost))  # an epoch begins: all say again what they hold
            taken.hear_again()
        run(agent)
    return agent, board


def _restarted(agent: Agent, ownership: Ownership) -> Sequence[Fault]:
    """Lets the coordinator begin again after the end of all workers; returns the faults that have not struck."""
    if agent.origin is None:
        agent.node.handle(JobRestart(now_ns(), ownership.shadows))
    else:
        agent.node.handle(JobResumption(now_ns(), agent.origin.step, ownership.owners, ownership.shadows))
    return agent.injector.injection.waiting


def _origin(recorder: Recorder, origin: Resumption | None, before: Agent | None) -> Resumption | None:
    """Returns the checkpoint that the workers begin with; records it, unless workers began with it before."""
    found = origin if before is None else before.origin
    if found is not None:
        lost = 0 if before is None else max(0, before.run_state.committed - found.step)
        recorder.write(ResumedRecord(step=found.step, place=found.place, file=found.file, run=found.run, lost=lost))
    return found or origin


def _supervise(server: ForkServer, interrupts: Interrupts, agent: Agent) -> None:
    """Runs until every worker has ended, or until a record of the agent cannot be written: no more could be proved."""
    interrupts.patience_s = interrupts.step_grace_s + _CALL_PATIENCE_S
    if server.host:  # a signal may be a notice for the workers of this host, and the run goes on
        interrupts.let_wait()
    try:
        supervise(agent, server, interrupts)
    except HandoverError:
        with contextlib.suppress(StorageError):
            agent.recorder.settle()  # the last records are shipped from the disk
        server.leave()
        raise
    except StorageError as error:
        agent.cause = StorageError(f"{error}; {agent.run_state.progress()}")
        agent.abandon()


def _forced(recorder: Recorder, stack: contextlib.ExitStack, number: signal.Signals) -> None:
    """Records the end of training whose process is about to end, and releases its resources, also on a full disk."""
    with stack, telling_unwritten():
        recorder.write(InterruptRecord(signal=number.name))
        recorder.write(TrainingEndedRecord(outcome="interrupted", exit_code=128 + number))
        recorder.settle(at_once=True)


class _Look:
    """The work of every tick of an agent; the policy is also asked at a verdict that takes workers in."""

    def __init__(
        self, job: Job, watch: Watching, requests: FaultRequests, source: NoticeSource | None, crew: WorkerGroup
    ):
        self._job, self._watch, self._requests, self._source = job, watch, requests, source
        self._crew, launch = crew, crew.launch
        self._joins = JoinRequests(launch.logs.parent, job, launch.recorder)
        self._asked, self._memory = Rebalancing(()), MemoryLook()
        self._gpus = GpuLook() if job.device == "cuda" else None

    def tick(self, agent: Agent) -> None:
        if not agent.recorder.look():  # all of this reads the folder of the run
            return
        self._watch(_view(agent, self._crew.board))
        self._requests.look(agent.injector)
        if self._source is not None:
            self._source.look(agent)
        self._joins.look(agent.node.state, _hands(agent, self._crew))
        agent.checkpoints.record()
        for load in self._gpus.found() if self._gpus else ():
            agent.recorder.write(LoadRecord(**load._asdict()))
        if not agent.is_stopping:
            run, known, newcomers = agent.run_state, agent.node.state, agent.newcomers.numbers
            self._memory = look_at_memory(self._memory, run, known, newcomers, agent.decide)
        self.ask(agent)

    def ask(self, agent: Agent, *, takes_in: bool = False) -> None:
        if self._job.elastic and not agent.is_stopping:
            run, known = agent.run_state, agent.node.state
            self._asked = ask(self._asked, run, known, agent.recorder, agent.decide, takes_in=takes_in)


def _hands(agent: Agent, crew: WorkerGroup) -> WorkerControls:
    """Returns what requests for workers are carried out with."""

    def start(joins: bool) -> int:
        if why := crew.lacks_gpu():
            raise ValueError(f"each worker needs a GPU of its own, and there is {why}")
        with crew.launch.server.forking():
            member = crew.start_waiting()
        crew.welcome(member, joins=joins)
        agent.add(member)
        return member.worker

    def notify(worker: int) -> bool:
        if worker in crew.members:
            crew.members[worker].child.signal(signal.SIGTERM)
        return worker in crew.members

    return WorkerControls(start, notify, crew.launch.numbers, agent.is_stopping)


def _view(agent: Agent, board: ProgressBoard) -> RunView:
    sightings, slow = agent.node.state.sightings, slow_workers(agent.run_state.times.paces)
    workers = tuple(
        worker_view(each, board, sightings.get(each.worker), is_slow=each.worker in slow)
        for each in agent.members.values()
    )
    return RunView(agent.run_state, workers, agent.interrupted is not None)


def _ending(agent: Agent, view: RunView, started_at_ns: int) -> Ending:
    outcome, code = "finished", int(ExitCode.OK)
    if agent.cause is not None:
        outcome, code = "failed", int(agent.cause.exit_code)
    elif agent.interrupted is not None and agent.run_state.committed < agent.run_state.job.steps - 1:
        outcome, code = "interrupted", 128 + agent.interrupted
    missing = agent.run_state.missing() if outcome == "finished" else ()
    return Ending(outcome, code, agent.cause, view, started_at_ns, now_ns(), missing)
