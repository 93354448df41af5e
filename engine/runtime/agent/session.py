"""The life of a run, in order: its files, its processes, its workers, their agent; and again, while they begin again.

run_session   opens the records, starts fork server, store and keeper, and returns the ending
_Run.train    starts the workers or takes them over, runs their agent, and begins again after a loss
supervise     the loop of an agent: messages and ends of workers, signals, the clock
PeriodicTasks the work of each tick: pictures, requests, notices, checkpoints, the policy
"""

from __future__ import annotations

import contextlib
import secrets
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

from engine.codec.messages import decode, prepare_to_decode
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
from engine.core.history.run_records import LoadRecord, PolicyRecord
from engine.core.hosts.notice_answer import NoticeFrom
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership, shadowed
from engine.core.job.update_rules import preloads
from engine.core.message_kinds import ToAgent
from engine.core.monitors import NO_MONITORS
from engine.core.ownership import Ownership
from engine.core.protocol.coordinator_state import first_state
from engine.core.protocol.events import JobRestart, Takeover
from engine.core.protocol.inputs_outputs import JobResumption
from engine.core.protocol.rebalancing import MemoryLook, Rebalancing
from engine.core.protocol.schedule_change import OWN
from engine.core.protocol.schedule_policy import ScheduleLook, look
from engine.core.protocol.worker_times import speeds
from engine.files.accelerators import GpuLook, refuse_what_this_host_lacks
from engine.runtime.agent.agent import Agent, AgentTasks
from engine.runtime.agent.coordinator import Node, join_store
from engine.runtime.agent.injector import FaultRequests
from engine.runtime.agent.keeper import Keeper, keeper_for
from engine.runtime.agent.newcomers import ask, look_at_memory
from engine.runtime.agent.notice_source import NoticeSource, asked_for
from engine.runtime.agent.requests import JoinRequests, WorkerControls
from engine.runtime.agent.run_state import (
    LEFT,
    NO_SEAT,
    Ending,
    FailoverContext,
    InheritedRun,
    RunState,
    RunView,
    ended,
    reporting_unwritten,
    worker_view,
)
from engine.runtime.agent.schedule_requests import ScheduleRequests
from engine.runtime.agent.start_up import LaunchSpec, WorkerGroup, recording
from engine.runtime.agent.worker_handles import LocalWorkers, WorkerHandle, give_slots
from engine.runtime.process.clock import TICK_S, now_ns
from engine.runtime.process.fork_client import ForkServer
from engine.runtime.process.interrupts import Interrupts, RunInterruptedError, holding
from engine.runtime.process.link import swept_of_nccl
from engine.runtime.process.recorder import Recorder
from engine.runtime.process.spawner import HostMailbox, Spawner, WorkerProcess
from engine.runtime.store.etcd_settings import EtcdSettings

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
    server: Spawner | None = None,
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
    folder, ranks = str(seat.inherited.home if seat.inherited else events.parent), ranks or ownership.workers()
    monitors = NO_MONITORS if origin is None else origin.monitors
    first = first_state(job, ownership, now_ns(), begun_with(origin), server.later_ns if server else 0, monitors)
    with contextlib.ExitStack() as files, holding() as interrupts:
        recorder, record_fds = recording(files, events, job, injectable, host, server, seat.scribe, not seat.folder)
        try:
            with contextlib.ExitStack() as stack, interrupts.forcing(partial(_forced, recorder, stack)):
                (interrupts.let_wait if seat.inherited else interrupts.check)()
                stack.enter_context(swept_of_nccl() if job.backend == "nccl" else contextlib.nullcontext())
                server = server or stack.enter_context(ForkServer())
                prepare_to_decode(ToAgent)  # while that imports torch
                node = join_store(stack, etcd, run_id or secrets.token_hex(4), logs, first, recorder, seat.lease)
                # The leases of this host are kept while the fork server imports torch, for longer on a busy machine.
                stack.enter_context(server.adopting(preloads(job), lambda: node.renew(now_ns())))
                launch = LaunchSpec(stack, server, job, ownership, ranks, recorder, record_fds, logs, folder, faults)
                keeper = stack.enter_context(keeper_for(server, job, folder, events.parent.name))
                requests = FaultRequests(events.parent, job, launch.numbers, recorder, injectable)
                tasks_of = partial(PeriodicTasks, watch=watch, requests=requests, source=asked_for(stack, notices))
                run = _Run(node, tasks_of, keeper, interrupts, revive, grace_s, seat.inherited)
                agent = run.train(launch, origin)
                ending = _ending(agent, _view(agent), started_at_ns)
                return ending if agent.has_left else ended(recorder, ending)
        except RunInterruptedError as error:
            return _broken_off(recorder, job, error, started_at_ns)


def _first_ownership(job: Job, ownership: Ownership, server: Spawner | None, seat: FailoverContext) -> Ownership:
    if server is None or not server.host:  # each of several has done so before it came to the others
        refuse_what_this_host_lacks(job)
    return ownership if seat.inherited else _on_hosts(job, ownership, server)


def _on_hosts(job: Job, ownership: Ownership, server: Spawner | None) -> Ownership:
    """Deals the workers to the hosts that are there; returns the ownership with shadows on other hosts, if possible."""
    workers = ownership.workers()
    if server is None:
        return shadowed(job, ownership, workers, None)
    server.deal(workers)
    return shadowed(job, ownership, workers, {worker: server.at(worker).host for worker in workers})


def _broken_off(recorder: Recorder, job: Job, error: RunInterruptedError, started_at_ns: int) -> Ending:
    """Records and returns the end of a run that a signal has broken off before its agent was there."""
    recorder.write(InterruptRecord(signal=error.number.name))
    view = RunView(RunState(job), ())
    return ended(recorder, Ending("interrupted", error.exit_code, None, view, started_at_ns, now_ns()))


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose store, servers and files are there; `inherited` is what another host has begun."""

    node: Node
    tasks_of: Callable[[WorkerGroup], PeriodicTasks]
    keeper: Keeper
    interrupts: Interrupts
    revive: Callable[[Agent], Resumption | None]
    grace_s: float
    inherited: InheritedRun | None

    def train(self, launch: LaunchSpec, origin: Resumption | None) -> Agent:
        """Runs the workers to their end, again while they are to be started again; returns the last agent.

        The first agent of a run that another host has begun takes over its workers.
        """
        before = self.inherited
        agent = self._goes_on(launch, origin, before) if before else self._begins(launch, launch.faults, origin)
        self._supervise(agent, launch.server)
        while agent.is_to_restart:
            launch = replace(launch, ownership=_on_hosts(launch.job, launch.ownership, launch.server))
            agent = self._begins(launch, _restarted(agent, launch.ownership), origin, agent)
            self._supervise(agent, launch.server)
        return agent

    def _begins(
        self, launch: LaunchSpec, faults: Sequence[Fault], origin: Resumption | None, before: Agent | None = None
    ) -> Agent:
        """Starts the workers; returns their agent, which goes on after the agent `before`."""
        begins = _recorded(launch.recorder, origin, before)
        return self._enrolled(launch, launch.start(faults, begins), begins, before)

    def _goes_on(self, launch: LaunchSpec, origin: Resumption | None, inherited: InheritedRun) -> Agent:
        """Takes over the workers of another host; returns their agent."""
        group = launch.take_over(inherited, origin)
        agent = self._enrolled(launch, group, origin, results=inherited.results)
        agent.num_notices = inherited.notices
        agent.newcomers.know(inherited.place)
        agent.run_state.notes += agent.injector.take_over(inherited.faults, inherited.lost)
        give_slots(group.members.values(), self.node.coordination.ownership)
        agent.decide(Takeover(now_ns(), lost=inherited.lost))  # an epoch begins: all say again what they hold
        inherited.hear_again()
        return agent

    def _enrolled(
        self,
        launch: LaunchSpec,
        group: WorkerGroup,
        begins: Resumption | None,
        before: Agent | None = None,
        results: RunState | None = None,
    ) -> Agent:
        agent = Agent(
            launch.job,
            group.members,
            launch.recorder,
            self.node,
            self.tasks_of(group),
            before,
            group.board,
            grace_s=self.grace_s,
            faults=launch.faults,
            revive=self.revive,
            keeper=self.keeper,
            begins=begins,
            results=results,
            own_host=launch.server.host,
        )
        for member in group.members.values():
            self.node.enrol(member.worker, member.child.pid, member.slots, host=member.host)
        return agent

    def _supervise(self, agent: Agent, server: Spawner) -> None:
        """Runs until every worker has ended, or a record of the agent cannot be written: no more could be proved."""
        self.interrupts.patience_s = self.interrupts.step_grace_s + _CALL_PATIENCE_S
        if server.host:  # a signal may be a notice for the workers of this host, and the run continues
            self.interrupts.let_wait()
        try:
            supervise(agent, server, self.interrupts)
        except StorageError as error:
            agent.cause = StorageError(f"{error}; {agent.run_state.progress()}")
            agent.abandon()
        if agent.has_left:
            with contextlib.suppress(StorageError):
                agent.recorder.settle()  # the last records are shipped from the disk
            server.leave()


def _restarted(agent: Agent, ownership: Ownership) -> Sequence[Fault]:
    """Lets the coordinator begin again after the end of all workers; returns the faults that have not struck."""
    if agent.origin is None:
        agent.node.handle(JobRestart(now_ns(), ownership.shadows))
    else:
        begins = agent.origin.step, ownership.owners, ownership.shadows, agent.origin.monitors
        agent.node.handle(JobResumption(now_ns(), *begins))
    return agent.injector.injection.waiting


def _recorded(recorder: Recorder, origin: Resumption | None, before: Agent | None) -> Resumption | None:
    """Returns the checkpoint that the workers begin with; records it, unless workers began with it before."""
    resumption = origin if before is None else before.origin
    if resumption is not None:
        lost = 0 if before is None else max(0, before.run_state.committed - resumption.step)
        place, file, run = resumption.place, resumption.file, resumption.run
        recorder.write(ResumedRecord(step=resumption.step, place=place, file=file, run=run, lost=lost))
    return resumption or origin


def _forced(recorder: Recorder, stack: contextlib.ExitStack, number: signal.Signals) -> None:
    """Records the end of training whose process is about to end, and releases its resources, also on a full disk."""
    with stack, reporting_unwritten():
        recorder.write(InterruptRecord(signal=number.name))
        recorder.write(TrainingEndedRecord(outcome="interrupted", exit_code=128 + number))
        recorder.settle(at_once=True)


def _ending(agent: Agent, view: RunView, started_at_ns: int) -> Ending:
    outcome, code = "finished", int(ExitCode.OK)
    if agent.has_left:
        outcome = LEFT
    elif agent.cause is not None:
        outcome, code = "failed", int(agent.cause.exit_code)
    elif agent.interrupted is not None and not agent.run_state.has_all_steps:
        outcome, code = "interrupted", 128 + agent.interrupted
    missing = agent.run_state.missing() if outcome == "finished" else ()
    return Ending(outcome, code, agent.cause, view, started_at_ns, now_ns(), missing)


# The event loop of the agent: waits for workers' messages and exits, signals and the clock.
def supervise(agent: Agent, server: Spawner, interrupts: Interrupts) -> None:
    """Runs until every worker has ended or is left behind, or this host has left the run."""
    watched: dict[WorkerProcess, WorkerHandle] = {}
    server_pid = _look_at(server, agent, 0)
    with contextlib.closing(LocalWorkers(server)) as workers:
        workers.add(interrupts, lambda: agent.interrupt(interrupts.take(), interrupts.step_grace_s))
        for mailbox in server.news:
            workers.add(mailbox, partial(_take_news, agent, watched, mailbox))
        ticked_s = 0.0
        while any(member.is_there for member in agent.members.values()) and not agent.has_left:
            for member in islice(agent.members.values(), len(watched), None):  # at first, and when one more was started
                watched[member.child] = member
                workers.watch_member(member, agent.hear, partial(_end, agent), agent.sees_end)
            workers.wait(min(TICK_S, agent.due_s - time.monotonic()))
            agent.look_at_deadlines()
            now_s = time.monotonic()
            if now_s - ticked_s >= TICK_S:
                ticked_s = now_s
                agent.look_at_clock(server.round_trip_ns)
                for record in server.network_records():
                    agent.recorder.write(record)
                server_pid = _look_at(server, agent, server_pid)
    if not agent.has_left:
        _look_at(server, agent, server_pid)  # a short run may end between two ticks
        agent.close()


def _take_news(agent: Agent, watched: Mapping[WorkerProcess, WorkerHandle], mailbox: HostMailbox) -> None:
    for process, item in mailbox.take():
        if (member := watched.get(process)) is None:
            continue  # it could not be started, or is of a start before
        if isinstance(item, bytes):
            agent.hear(member, decode(item))
        else:
            _end(agent, member, item)


def _end(agent: Agent, member: WorkerHandle, code: int) -> None:
    agent.exited(member, code)
    member.release()


def _look_at(server: Spawner, agent: Agent, before: int) -> int:
    """Records the end of the fork server `before` and the start of another; returns the present pid, 0 for none."""
    now = 0 if server.has_ended() else server.pid
    if before not in (0, now):
        agent.recorder.write(ForkServerEndedRecord(child=before))
    if now not in (0, before):
        agent.recorder.write(ForkServerRecord(child=now))
    return now


def _view(agent: Agent) -> RunView:
    sightings, slow = agent.node.state.sightings, speeds(agent.run_state.times.paces)
    board = required(agent.board, "the workers of a session have a board")
    workers = tuple(
        worker_view(member, board, sightings.get(member.worker), is_slow=member.worker in slow)
        for member in agent.members.values()
    )
    return RunView(agent.run_state, workers, agent.interrupted is not None)


class PeriodicTasks(AgentTasks):
    """The work of every tick of an agent; the policy is also asked at a verdict that takes workers in."""

    def __init__(self, group: WorkerGroup, watch: Watching, requests: FaultRequests, source: NoticeSource | None):
        self._group, self._job, launch = group, group.launch.job, group.launch
        self._watch, self._requests, self._source = watch, requests, source
        self._joins = JoinRequests(launch.logs.parent, self._job, launch.recorder)
        self._schedules = ScheduleRequests(launch.logs.parent, self._job, launch.recorder)
        self._asked, self._memory, self._look = Rebalancing(()), MemoryLook(), ScheduleLook()
        self._gpus = GpuLook() if self._job.device == "cuda" else None

    def tick(self, agent: Agent) -> None:
        """Shows the run, answers requests, records what has come, and asks the policy."""
        if not agent.recorder.look():  # all of this reads the folder of the run
            return
        self._watch(_view(agent))
        self._requests.look(agent.injector)
        if self._source is not None:
            self._source.look(agent)
        self._joins.look(agent.node.state, _controls(agent, self._group))
        agent.checkpoints.record()
        for load in self._gpus.found() if self._gpus else ():
            agent.recorder.write(LoadRecord(**load._asdict()))
        if not agent.is_stopping:
            self._schedules.look(agent.node.state, agent.decide)
            self._adapt(agent)
            run, state, newcomers = agent.run_state, agent.node.state, agent.newcomers.numbers
            self._memory = look_at_memory(self._memory, run, state, newcomers, agent.decide)
        self.ask(agent)

    def ask(self, agent: Agent, *, takes_in: bool = False) -> None:
        """Asks the policy of an elastic job; `takes_in`: a verdict takes workers in, and no answer to it is heard."""
        if self._job.elastic and not agent.is_stopping:
            run, state = agent.run_state, agent.node.state
            self._asked = ask(self._asked, run, state, agent.recorder, agent.decide, takes_in=takes_in)

    def _adapt(self, agent: Agent) -> None:
        """Asks for another schedule, if the job adapts it and the measured times make one quicker."""
        if not self._job.adapt_schedule:
            return
        state = agent.node.state
        self._look, change = look(self._look, self._job, state, agent.run_state.times, now_ns())
        if change is not None:
            why = f"schedule {change.schedule or OWN}: {change.why}"
            agent.recorder.write(PolicyRecord(step=state.committed, why=why, owners=()))
            agent.decide(change)


def _controls(agent: Agent, group: WorkerGroup) -> WorkerControls:
    """Returns what requests for workers are carried out with."""

    def start(joins: bool) -> int:
        if why := group.lacks_gpu():
            raise ValueError(f"each worker needs a GPU of its own, and there is {why}")
        with group.launch.server.forking():
            member = group.start_waiting()
        group.welcome(member, joins=joins)
        agent.add(member)
        return member.worker

    def notify(worker: int) -> bool:
        if worker in group.members:
            group.members[worker].child.signal(signal.SIGTERM)
        return worker in group.members

    return WorkerControls(start, notify, group.launch.numbers, agent.is_stopping)
