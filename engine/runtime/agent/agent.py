"""The agent: watches the workers of this host, and is the driver of the coordinator: it carries out its outputs.

    dead worker      agent
    exits ---------> Ended -> coordinator: verdict, epoch, plan, go, commit (engine/core/protocol/coordinator.py)

Rules: the pidfd of a worker proves that the worker has ended; the message of another worker is only a suspicion. If the
other workers cannot replace a failed worker, the run fails: the agent keeps the first cause, tells every worker to
stop, and kills the remaining workers after a deadline. A finished run has the same deadlines. A process that survives
SIGKILL is recorded and left behind. `session.py` calls it.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from engine.core import messages
from engine.core.checkpoint_rules import KeptMessage, Resumption, UnkeptMessage, begun_with, keeps_last
from engine.core.errors import (
    BambooError,
    CoordinatorUnavailableError,
    DivergedError,
    ExitCode,
    StorageError,
    WorkerFailedError,
)
from engine.core.faults.fault import Fault
from engine.core.faults.injection import MomentReport
from engine.core.history import process_records as records
from engine.core.history.run_records import GoRecord, PaceRecord
from engine.core.hosts import ends
from engine.core.hosts.ends import HostAgent, HostEnd, HostOutput
from engine.core.job.job import Job
from engine.core.message_kinds import Message, ToWorker
from engine.core.messages import (
    BusyMessage,
    LinkWantedMessage,
    NoticeMessage,
    PingMessage,
    PureMessage,
    RaisedMessage,
)
from engine.core.program.ballot import VoteMessage
from engine.core.program.inventory import InventoryMessage
from engine.core.protocol import inputs_outputs, orders
from engine.core.protocol.events import LeaseExpired, Notice, WorkerWord
from engine.core.protocol.inputs_outputs import ClockTick, CoordinatorInput, ProcessExit, RunStopping
from engine.core.protocol.rebalancing import nobody_takes_over
from engine.core.protocol.state import Phase
from engine.runtime.agent.checkpoints import Checkpoints
from engine.runtime.agent.coordinator import Node
from engine.runtime.agent.injector import Injector
from engine.runtime.agent.keeper import NO_KEEPER, Keeper
from engine.runtime.agent.newcomers import Newcomers
from engine.runtime.agent.run_state import RunState, audit_record
from engine.runtime.agent.worker_handles import WorkerHandle, give_slots, sights_of, tell_all
from engine.runtime.process.clock import now_ns
from engine.runtime.process.link import LinkPairs
from engine.runtime.process.progress_board import ProgressBoard
from engine.runtime.process.recorder import Recorder

_START_GRACE_NS = 300_000_000
_GONE_S = 2.0  # from SIGKILL, where no record can be written any more
_FINDINGS = (ExitCode.NOT_FINITE, ExitCode.INTERNAL)  # errors that an interrupt does not explain


# The agent's own part in a message of a worker, for results, pictures and faults; the coordinator has the others.
def _on_audit(own: Agent, member: WorkerHandle, audit: messages.AuditMessage) -> None:
    own.run_state.audit(member.worker, audit)
    own.recorder.write(audit_record(member.worker, audit))


def _on_vote(own: Agent, member: WorkerHandle, vote: VoteMessage) -> None:
    own.run_state.vote(member.worker, vote)
    for each in own.run_state.computed(member.worker, vote):
        own.recorder.write(PaceRecord(of=each.worker, step=each.step, slowness=each.slowness, why=each.why))


def _on_finished(own: Agent, member: WorkerHandle, finished: messages.FinishedMessage) -> None:
    member.state = "finished"
    member.peak_stash = {(pipeline, stage): peak for pipeline, stage, peak in finished.peak_stash}
    member.peak_memory_kib = finished.peak_memory_kib


def _on_raised(own: Agent, member: WorkerHandle, raised: messages.RaisedMessage) -> None:
    exception, step = raised.exception, raised.step if own.run_state.going_at_ns else -1
    is_of_job = step < 0 and exception.place  # every worker would raise it
    if step >= 0 and own.run_state.first_to_raise(member.worker, raised) != member.worker:
        return  # the end of the run tells of both
    text = own.run_state.at_start(exception) if is_of_job else f"worker {member.worker} {exception.in_step(step)}"
    own.run_state.note("\n  ".join([f"{text}; full text in {member.log}", *exception.frames.splitlines()]))


_OWN_PARTS: dict[type[Message], Callable[[Agent, WorkerHandle, Any], object]] = {
    LinkWantedMessage: lambda own, member, wanted: own.pairs.link(member, wanted),
    messages.CutMessage: lambda own, member, cut: own.run_state.cut(cut),
    PureMessage: lambda own, member, pure: own.run_state.purity.add(member.worker, pure.rows),
    BusyMessage: lambda own, member, busy: member.begin(member.state, busy),
    messages.ReadyMessage: lambda own, member, ready: member.begin("ready"),
    messages.WaitingMessage: lambda own, member, waiting: member.begin("waiting"),
    VoteMessage: _on_vote,
    messages.AuditMessage: _on_audit,
    messages.ValidationMessage: lambda own, member, outcome: own.run_state.validated(outcome),
    messages.FinishedMessage: _on_finished,
    messages.RaisedMessage: _on_raised,
    InventoryMessage: lambda own, member, message: own.injector.reached("inventory", message.epoch),
    KeptMessage: lambda own, member, message: own.checkpoints.kept(message),
    UnkeptMessage: lambda own, member, message: own.checkpoints.unkept(message),
    messages.StrikeMessage: lambda own, member, message: own.injector.strike(
        message.fault, MomentReport(member.worker, message.step, message.done)
    ),
    messages.FaultEffectMessage: lambda own, member, message: own.injector.sees(
        member.worker, "suffered", message.how, message.fault
    ),
    messages.MarkMessage: lambda own, member, mark: own.injector.reached(mark.phase, mark.epoch),
}


_LEAVE_GRACE_NS = 2_000_000_000  # from the permission to leave to the end of all workers
_STEP_OF_ALL_S = 10.0  # for the open step of a run whose hosts all have a notice
_LAST_WORDS_NS = 1_000_000_000  # the same, for the last messages if a worker is missing after the last commit


class AgentTasks:
    """The work of an agent beside the protocol; here none."""

    def tick(self, agent: Agent) -> None:
        """Does the work of a tick."""

    def ask(self, agent: Agent, *, takes_in: bool = False) -> None:
        """Asks the policy; `takes_in`: a verdict takes workers in, and no answer to it is heard yet."""


class Agent:
    """Runs one job to its end on workers that have been started."""

    def __init__(
        self,
        job: Job,
        members: dict[int, WorkerHandle],
        recorder: Recorder,
        node: Node,
        tasks: AgentTasks,
        before: Agent | None = None,
        board: ProgressBoard | None = None,
        *,
        grace_s: float = 120.0,
        faults: Sequence[Fault] = (),
        revive: Callable[[Agent], Resumption | None] = lambda agent: None,
        keeper: Keeper = NO_KEEPER,
        begins: Resumption | None = None,
        results: RunState | None = None,
        own_host: str = "",
    ):
        """`members` begin after the checkpoint `begins` and the agent `before`; `results` are of a run taken over."""
        after = begun_with(begins)
        self.run_state: RunState = results or RunState(job, after) if before is None else before.run_state.again(after)
        self.members, self.recorder = members, recorder
        self.own_host, self.num_notices = own_host, 0  # of several hosts: the name of this one
        self.host = HostAgent(frozenset(members))
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self.is_restarting = False
        self.origin: Resumption | None = None  # to go on with, after a loss of state
        self.node, self._tasks, self.board = node, tasks, board
        self.has_left = False  # all workers of this host, after a notice: another host goes on with the run
        self.newcomers: Newcomers = Newcomers(members, lambda: node.state)
        self._revive, self.grace_ns = revive, round(grace_s * 1e9)
        self.injector: Injector = Injector(job, faults, members, recorder, board, lambda: node.state)
        self.checkpoints: Checkpoints = Checkpoints(keeper, self.run_state, recorder, begins)
        self.pairs: LinkPairs = LinkPairs(self.living)
        if before is not None:
            self.injector.go_on(before.injector)
        self._told_ns = 0  # before the last message for the present input, if no record has followed
        self._seen_ns: dict[int, int] = {}
        self._keys_to_delete: list[int] = []

    @property
    def _has_finished(self) -> bool:
        return self.node.state.phase is Phase.FINISHED

    @property
    def _is_ending(self) -> bool:
        return self.is_stopping or self._has_finished

    def hear(self, member: WorkerHandle, message: Message) -> None:
        """Handles a message of a worker; one of a worker that is out is ignored, as it may not know that it is out."""
        worker = member.worker
        with self.failing():
            if worker in self.node.state.out:
                return
            is_of_end = self.is_stopping and isinstance(message, RaisedMessage)
            if not is_of_end and self.take_own_part(member, message):
                return
            if isinstance(message, NoticeMessage):
                grace_ns = self.injector.injection.grace_ns(worker) or self.grace_ns
                self.decide(Notice(now_ns(), worker, grace_ns))
                self.injector.sees(worker, "notice", f"{grace_ns / 1e9:g} s")
                return
            outputs = self.decide(WorkerWord(now_ns(), worker, message, member.host or self.node.name))
            if isinstance(message, RaisedMessage) and inputs_outputs.Fail not in map(type, outputs):
                self.injector.sees(worker, "raised", message.exception.error)

    def take_own_part(self, member: WorkerHandle, message: Message) -> bool:
        """Handles the agent's part in a message; returns whether that is all. Raises the errors that it reports."""
        if (take := _OWN_PARTS.get(type(message))) is not None:
            take(self, member, message)
        return isinstance(message, KeptMessage | UnkeptMessage | BusyMessage | LinkWantedMessage)

    def _close_step(self) -> None:
        if (closed := self.run_state.take_closed()) is not None:
            self.checkpoints.close_step(*closed)

    def sees_end(self, member: WorkerHandle) -> None:
        """Notes the time at which a worker's end was seen."""
        self._seen_ns.setdefault(member.worker, now_ns())

    def _may_end(self, member: WorkerHandle) -> bool:
        worker = member.worker
        is_known = worker in self.node.state.out or worker in self.newcomers
        return is_known or member.state in ("finished", "failed") or self._is_ending

    def add(self, member: WorkerHandle) -> None:
        """Takes in a worker that was started while the run continues: it will wait."""
        self.members[member.worker] = member
        self.end_workers(ends.take_in, member.worker)
        self.newcomers.greet(member)
        with self.failing():
            self.node.enrol(member.worker, member.child.pid, member.slots, host=member.host)

    def exited(self, member: WorkerHandle, code: int) -> None:
        """Handles the end of a worker's process."""
        self.sees_end(member)
        worker, member.exit_code = member.worker, code
        self.end_workers(ends.see_end, worker)
        out, expected = self.node.state.out.get(worker), self._may_end(member)
        seen_ns = self._seen_ns[member.worker]
        self.recorder.write(records.ExitRecord(of=member.worker, code=code, expected=expected, seen_ns=seen_ns))
        is_lost = out.is_loss if out is not None else bool(code) and not self._is_ending
        if not expected or is_lost:
            member.state = "dead"
        elif out is not None or member.state == "finished" or worker in self.newcomers or self._has_finished:
            member.state = "left"
        self.injector.exit_seen(member.worker, code)
        if member.child.lost and worker not in self.node.state.out:  # with its whole host, which is one verdict
            self.run_state.note(f"host {member.host} is lost: {member.child.lost}")
            self.decide(LeaseExpired(now_ns(), member.host))
        self.decide(ProcessExit(now_ns(), member.worker, code, self.injector.places().get(member.worker)))
        self._keys_to_delete.append(member.worker)  # at the next tick: the workers wait for the epoch now

    def decide(self, event: CoordinatorInput) -> tuple[inputs_outputs.CoordinatorOutput, ...]:
        """Lets the coordinator decide on an input as one transaction; carries out its outputs and returns them."""
        outputs: tuple[inputs_outputs.CoordinatorOutput, ...] = ()
        with self.failing():
            owners, members = self.node.coordination.owners, self.node.state.members
            outputs = self.node.handle(event)
            self._take_monitors()
            if (new := self.node.coordination.owners) is not owners and new != owners:
                give_slots([self.members[each] for each in self.node.state.members], self.node.coordination.ownership)
            self._told_ns = 0
            for output in inputs_outputs.recorded_first(outputs) if self.own_host else outputs:
                self.carry_out(output)
            state = self.node.state
            is_other = state.members is not members and state.phase is Phase.FAILING_OVER
            if is_other and not set(members).issuperset(state.members):
                self._tasks.ask(self, takes_in=True)
        return outputs

    def _take_monitors(self) -> None:
        before, now = self.run_state.monitors, self.node.coordination.monitors
        if now is not before:
            self.run_state.monitors = now
            if now.validated != before.validated:
                self.checkpoints.validated(now)

    def carry_out(self, output: inputs_outputs.CoordinatorOutput | HostOutput) -> None:
        """Carries out a decision of the coordinator, or one about the ends of processes."""
        _CARRY_OUT[type(output)](self, output)

    def broadcast(self, message: ToWorker) -> None:
        """Sends a message to every live worker."""
        self._tell(orders.tell_all(self.node.coordination, message))

    def _tell(self, tell: inputs_outputs.Tell) -> None:
        self._told_ns = now_ns()  # before any worker hears it, or a fast one would act before the record's time
        tell_all((self.members[worker] for worker in tell.workers if worker in self.members), tell.message)

    def _write(self, write: inputs_outputs.Write) -> None:
        record = replace(write.record, at_ns=write.record.at_ns or self._told_ns or now_ns())
        self._told_ns = 0
        is_new = self.run_state.books(record)
        self._close_step()
        if is_new:
            self.recorder.write(record)
        if isinstance(record, GoRecord):
            for worker in self.node.state.members:
                self.members[worker].state = "running"

    def _restart(self, restart: inputs_outputs.Restart) -> None:
        self.is_restarting = True
        self.stop()

    def _ends(self, stop: inputs_outputs.Stop) -> None:
        parts = "" if stop.stage is None else f"; look at {self.run_state.parts_of(stop.stage)}"
        logs = [f"; {self.members[each].account}" for each in self.node.state.out if each in self.members]
        self.fail(WorkerFailedError("".join([stop.text, parts, *logs]), stop.exit_code))

    def _fails(self, failed: inputs_outputs.Fail) -> None:
        member = self.members[failed.worker]
        member.state = "failed"
        self.fail(self.run_state.error_of(member, failed.last, has_commit=failed.has_commit))

    def _release(self, release: inputs_outputs.Release) -> None:
        """Lets all workers leave at once; if a worker is missing, first waits for the last messages of the others."""
        self.newcomers.stop()
        self.end_workers(ends.let_end, _LAST_WORDS_NS if release.cut_short else _LEAVE_GRACE_NS)

    def _tell_stop(self, stop: ends.StopWorkers) -> None:
        for output in self.node.handle(RunStopping(now_ns(), self._keeps_last)):
            self.carry_out(output)
        self.newcomers.stop()

    @property
    def due_s(self) -> float:
        """The time of the next deadline or late work of a fault."""
        return min(self.host.due_ns, self.injector.injection.due_ns) / 1e9

    def look_at_deadlines(self) -> None:
        """Does the late work of faults that is due, and handles a deadline that has passed."""
        self.injector.look_at_clock()
        if now_ns() >= self.host.due_ns:
            self.end_workers(ends.read_clock)

    def look_at_clock(self, round_trip_ns: int) -> None:
        """Runs the work of a tick: pictures, store, leases, deadlines of the protocol, pings."""
        self._tasks.tick(self)
        if not self._has_finished:  # then the store is no longer needed
            with self.failing():
                while self._keys_to_delete:
                    self.node.delete_member_key(self._keys_to_delete.pop())
                self.node.renew(now_ns())
                self.node.report(now_ns())
        if self.recorder.answers:  # else workers wait for the disk, and this time is not watched
            sights = sights_of(self.members.values(), self.board, self.node.state.members)
            self.decide(ClockTick(now_ns(), self.injector.places(), *sights, round_trip_ns))
        self.broadcast(PingMessage())
        self.newcomers.ping(now_ns())
        limit_ns = self.node.state.options.form_ns
        for member in self.newcomers.late(now_ns(), limit_ns):
            self.give_up(member, limit_ns / 1e9)
        self._hand_over()

    def interrupt(self, number: signal.Signals, step_grace_s: float) -> None:
        """Handles a signal to this process, and shows it; of several hosts SIGTERM is a notice for the own workers."""
        if not self.is_notice(number):
            self._end_after_step(number, step_grace_s)

    def _end_after_step(self, number: signal.Signals, step_grace_s: float) -> None:
        """Ends the run after the open step; without it after `step_grace_s`, at a second signal, before training."""
        self.interrupted = self.interrupted or number
        self.recorder.write(records.InterruptRecord(signal=number.name))
        is_training = self.run_state.going_at_ns > 0
        grace_ns = round(step_grace_s * 1e9) if is_training else _START_GRACE_NS
        last_ns = ends.TERM_NS if number is signal.SIGTERM else ends.LAST_NS
        self.end_workers(ends.interrupt, grace_ns, is_training, last_ns)
        self.newcomers.stop()
        self._tasks.tick(self)

    def _hand_over(self) -> None:
        """Leaves the run to the other hosts, when all workers of this one have left; ends it if all hosts are to go."""
        if self._is_ending:
            return
        others = any(each.exit_code is None for each in self.members.values())
        if self.num_notices and others and not self.own_living:
            self.has_left = True
        elif self.own_host and nobody_takes_over(self.node.state):
            self.run_state.note("all workers have a notice, and no other one can take over: the run ends")
            self._end_after_step(signal.SIGTERM, min(_STEP_OF_ALL_S, self.grace_ns / 2e9))

    # The ends of the run and of the processes of this host; `engine/core/hosts/ends.py` decides.

    def end_workers(self, rule: Callable[..., HostEnd], *arguments: int | str) -> None:
        """Lets a rule of `engine/core/hosts/ends.py` decide on an input, now, and carries out its outputs."""
        self.host, outputs = rule(self.host, now_ns(), *arguments)
        for output in outputs:
            self.carry_out(output)

    def kill(self, kill: ends.KillWorker) -> None:
        """Sends SIGKILL to a worker."""
        if kill.why:
            self.recorder.write(records.KilledRecord(of=kill.worker, why=kill.why))
        self.members[kill.worker].child.signal(signal.SIGKILL)

    def give_up(self, member: WorkerHandle, limit_s: float) -> None:
        """Kills a worker that has loaded code and data for too long, and says so; training continues."""
        why = f"has not loaded its code and data within {limit_s:g} s"
        self.end_workers(ends.give_up, member.worker, why)
        doing = f": it {member.doing}" if member.doing else ""
        self.run_state.note(f"{member.name}, not yet a member, {why}, and is given up{doing}; see {member.log}")

    def leave_behind(self, leave: ends.LeaveBehind) -> None:
        """Names a process that does not end."""
        member = self.members[leave.worker]
        member.is_left_behind = True
        self.recorder.write(records.LeftBehindRecord(of=member.worker, child=member.child.pid))
        self.run_state.note(f"{member.name} survived SIGKILL and is left behind")

    def abandon(self) -> None:
        """Kills every worker, and leaves those behind that wait for a disk which has stopped."""
        living = [each for each in self.members.values() if each.exit_code is None and not each.is_left_behind]
        for member in living:
            member.child.signal(signal.SIGKILL)
        until_s = time.monotonic() + _GONE_S
        for member in living:
            if member.child.wait(max(0.0, until_s - time.monotonic())) is None:
                with contextlib.suppress(StorageError):
                    self.leave_behind(ends.LeaveBehind(member.worker))

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Makes an error of the coordinator, of the run state or of a store the end of the run."""
        try:
            yield
        except BambooError as error:
            self.fail(error)

    def fail(self, cause: BambooError) -> None:
        """Keeps the first cause and stops every worker; an interrupted run has nothing to recover."""
        if self.cause is None and (self.interrupted is None or cause.exit_code in _FINDINGS):
            if isinstance(cause, CoordinatorUnavailableError):
                self.recorder.settle()  # raises, if its store lies on a disk that has stopped
                cause = CoordinatorUnavailableError(f"{cause}; {self.run_state.progress()}")
            elif isinstance(cause, DivergedError) and cause.layer is not None:
                name = self.run_state.layers[cause.layer]
                cause = DivergedError(
                    f"{cause}; the backward met it first in layer {cause.layer} ({name})", cause.layer
                )
            self.cause = cause
            self.recorder.write(records.FailedRecord(error=str(cause), notice=cause.notice))
        self.stop()

    def stop(self) -> None:
        """Stops every worker."""
        # Before training, workers may be blocked in forming a group; killing them early loses no work.
        is_training = self.run_state.going_at_ns and not self.is_restarting
        grace_ns = ends.KEEP_NS if self._keeps_last else ends.STOP_NS
        self.end_workers(ends.stop, grace_ns if is_training else _START_GRACE_NS)

    @property
    def _keeps_last(self) -> bool:
        if not self.checkpoints.place or self.is_restarting or self.host.is_forced:
            return False
        return self.interrupted is not None if self.cause is None else keeps_last(self.cause.exit_code)

    def is_notice(self, number: signal.Signals) -> bool:
        """Whether a signal is a notice for the workers of this host, one of several, which get it; a second kills."""
        if not self.own_host or number is not signal.SIGTERM or not self.run_state.going_at_ns:
            return False
        self.recorder.write(records.InterruptRecord(signal=number.name))
        self.num_notices += 1
        for member in self.own_living:
            member.child.signal(signal.SIGTERM if self.num_notices == 1 else signal.SIGKILL)
        return True

    def living(self, worker: int) -> WorkerHandle | None:
        """Returns a worker that has not ended."""
        member = self.members.get(worker)
        return member if member is not None and member.exit_code is None else None

    @property
    def own_living(self) -> list[WorkerHandle]:
        """The workers of this host, one of several, that have not ended."""
        return [each for each in self.members.values() if each.host == self.own_host and each.exit_code is None]

    @property
    def is_to_restart(self) -> bool:
        """Whether the workers are to be started again once all have ended, perhaps from a checkpoint (`origin`)."""
        return self.origin is not None or (self.is_restarting and not (self.cause or self.interrupted))

    @property
    def is_stopping(self) -> bool:
        """Whether the run ends now."""
        return self.host.is_stopping

    def close(self) -> None:
        """Completes the records and the run state after every worker has ended, if they are not started again."""
        if self.is_to_restart:
            return
        with self.failing():
            self.run_state.close_book()
            self._close_step()
            self.checkpoints.close()
        self.origin = self._revive(self)
        if self.origin is None:
            self.injector.close()


_CARRY_OUT: dict[type[inputs_outputs.CoordinatorOutput | HostOutput], Callable[[Agent, Any], object]] = {
    inputs_outputs.Tell: Agent._tell,
    inputs_outputs.Teach: lambda agent, teach: agent.newcomers.learn(teach.message),
    inputs_outputs.KeepStep: lambda agent, keep: agent.checkpoints.await_parts(keep.step, keep.epoch),
    inputs_outputs.OrphanParts: lambda agent, orphan: agent.checkpoints.begin_epoch(),
    inputs_outputs.Write: Agent._write,
    inputs_outputs.Kill: lambda agent, kill: agent.end_workers(ends.kill, kill.worker),
    inputs_outputs.Note: lambda agent, note: agent.run_state.note(note.text),
    inputs_outputs.PhaseReached: lambda agent, reached: agent.injector.reached(reached.phase, reached.epoch),
    inputs_outputs.Arm: lambda agent, arm: agent.injector.arm(),
    inputs_outputs.Restart: Agent._restart,
    inputs_outputs.Stop: Agent._ends,
    inputs_outputs.Fail: Agent._fails,
    inputs_outputs.Release: Agent._release,
    ends.StopWorkers: Agent._tell_stop,
    ends.EndStep: lambda agent, order: agent.decide(Notice(now_ns(), None, order.grace_ns)),
    ends.KillWorker: Agent.kill,
    ends.LeaveBehind: Agent.leave_behind,
}
