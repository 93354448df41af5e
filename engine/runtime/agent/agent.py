"""The agent: watches the workers of this host, and is the driver of the coordinator: it carries out its outputs.

    dead worker      agent                                  other workers
    exits ---------> ExitMessage ------------------------>  record it; nothing is decided yet
                     Ended -> coordinator: verdict, epoch, plan, go, commit (engine/core/coordinator/machine.py)

Rules: the pidfd of a worker proves that the worker has ended; the message of another worker is only a suspicion. If the
other workers cannot replace a failed worker, the run fails: the agent keeps the first cause, tells every worker to
stop, and kills the remaining workers after a deadline. A finished run has the same deadlines. A process that survives
SIGKILL is recorded and left behind. `event_loop.py` calls it.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from engine.core.agent import ends
from engine.core.agent.ends import HostOutput
from engine.core.checkpoints.resumption import Resumption, begun_with
from engine.core.config.job import Job
from engine.core.coordinator import orders, outputs
from engine.core.coordinator.inputs import CoordinatorInput, Ended, Passed, Stopping
from engine.core.elastic.way_out import nobody_takes_over
from engine.core.errors import WorkerFailedError
from engine.core.faults.fault import Fault
from engine.core.history import process_records as records
from engine.core.history.run_records import GoRecord
from engine.core.membership.events import Heard, LeaseExpired, Notice
from engine.core.membership.state import Phase
from engine.core.message_codec import Message, ToWorker
from engine.core.messages import ExitMessage, RaisedMessage
from engine.core.process_messages import NoticeMessage, PingMessage, StopMessage
from engine.runtime.agent.checkpoints import Checkpoints
from engine.runtime.agent.ends_of_run import EndsOfRun
from engine.runtime.agent.injector import Injector
from engine.runtime.agent.message_handlers import OwnParts
from engine.runtime.agent.newcomers import Newcomers
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.taken_run import HandedOverError
from engine.runtime.agent.worker_handles import WorkerHandle, give_slots, sights_of, tell_all
from engine.runtime.coordinator.node import Node
from engine.runtime.ipc.link_pairs import LinkPairs
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns
from engine.runtime.keeping.keeper import NO_KEEPER, Keeper

_LEAVE_GRACE_NS = 2_000_000_000  # from the permission to leave to the end of all workers
_STEP_OF_ALL_S = 10.0  # for the open step of a run whose hosts all have a notice
_LAST_WORDS_NS = 1_000_000_000  # the same, for the last messages if a worker is missing after the last commit


class Agent(EndsOfRun):
    """Runs one job to its end on workers that have been started."""

    def __init__(
        self,
        job: Job,
        members: dict[int, WorkerHandle],
        recorder: Recorder,
        node: Node,
        tick: Callable[[Agent], None],
        before: Agent | None = None,
        board: ProgressBoard | None = None,
        *,
        grace_s: float = 120.0,
        faults: Sequence[Fault] = (),
        revive: Callable[[Agent], Resumption | None] = lambda agent: None,
        keeper: Keeper = NO_KEEPER,
        begins: Resumption | None = None,
        results: RunState | None = None,
        on_joiners: Callable[[Agent], None] = lambda agent: None,
        own_host: str = "",
    ):
        """`on_joiners` is called when a verdict takes workers in, before any answer to it is heard.

        `members` begin after the checkpoint `begins`, and after the agent `before`. `results`: of a run taken over.
        """
        after = begun_with(begins)
        run_state = results or RunState(job, after) if before is None else before.run_state.again(after)
        super().__init__(members, recorder, run_state, own_host)
        self.node, self.tick, self._board, self._on_joiners = node, tick, board, on_joiners
        self.newcomers = Newcomers(members, lambda: node.state)
        self._revive, self.grace_ns = revive, round(grace_s * 1e9)
        self.injector = Injector(job, faults, members, recorder, board, lambda: node.state)
        self.checkpoints = Checkpoints(keeper, self.run_state, recorder, begins)
        self._own_parts = OwnParts(self.run_state, recorder, self.injector, self.checkpoints, LinkPairs(self.living))
        if before is not None:
            self.injector.go_on(before.injector)
        self._told_ns = 0  # before the last message for the present input, if no record has followed
        self._seen_ns: dict[int, int] = {}
        self._to_strike_off: list[int] = []

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
            if not is_of_end and self._own_parts.take(member, message):
                return
            if isinstance(message, NoticeMessage):
                grace_ns = self.injector.injection.grace_ns(worker) or self.grace_ns
                self.decide(Notice(now_ns(), worker, grace_ns))
                self.injector.sees(worker, "notice", f"{grace_ns / 1e9:g} s")
                return
            found = self.decide(Heard(now_ns(), worker, message, member.host or self.node.name))
            if isinstance(message, RaisedMessage) and not any(isinstance(each, outputs.Fail) for each in found):
                self.injector.sees(worker, "raised", message.exception.error)

    def sees_end(self, member: WorkerHandle) -> None:
        """Records the time at which a worker's end was seen, and announces it before the coordinator decides."""
        if member.worker not in self._seen_ns:
            self._seen_ns[member.worker] = now_ns()
            if not self._may_end(member):
                self.broadcast(ExitMessage(member.worker))

    def _may_end(self, member: WorkerHandle) -> bool:
        worker = member.worker
        is_known = worker in self.node.state.out or worker in self.newcomers
        return is_known or member.state in ("finished", "failed") or self._is_ending

    def add(self, member: WorkerHandle) -> None:
        """Takes in a worker that was started while the run goes on: it will wait."""
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
        self.decide(Ended(now_ns(), member.worker, code, self.injector.places().get(member.worker)))
        self._to_strike_off.append(member.worker)  # at the next tick: the workers wait for the epoch now

    def decide(self, given: CoordinatorInput) -> tuple[outputs.CoordinatorOutput, ...]:
        """Lets the coordinator decide on an input as one transaction; carries out its outputs and returns them."""
        found: tuple[outputs.CoordinatorOutput, ...] = ()
        with self.failing():
            owners, members = self.node.coordination.owners, self.node.state.members
            found = self.node.handle(given)
            if self.node.coordination.owners != owners:
                give_slots([self.members[each] for each in self.node.state.members], self.node.coordination.ownership)
            self._told_ns = 0
            for output in outputs.recorded_first(found) if self.own_host else found:
                self.carry_out(output)
            if self.node.state.phase is Phase.FAILING_OVER and not set(members).issuperset(self.node.state.members):
                self._on_joiners(self)
        return found

    def carry_out(self, output: outputs.CoordinatorOutput | HostOutput) -> None:
        """Carries out a decision of the coordinator, or one about the ends of processes."""
        _CARRY_OUT[type(output)](self, output)

    def broadcast(self, message: ToWorker) -> None:
        """Sends a message to every live worker."""
        self._tell(orders.tell_all(self.node.coordination, message))

    def _tell(self, tell: outputs.Tell) -> None:
        self._told_ns = now_ns()
        self.checkpoints.await_parts(tell.message, self.node.state)
        self.newcomers.learn(tell.message)
        tell_all((self.members[worker] for worker in tell.workers if worker in self.members), tell.message)

    def _write(self, write: outputs.Write) -> None:
        record = replace(write.record, at_ns=write.record.at_ns or self._told_ns or now_ns())
        self._told_ns = 0
        if self.run_state.books(record):
            self.recorder.write(record)
        if isinstance(record, GoRecord):
            for worker in self.node.state.members:
                self.members[worker].state = "running"

    def _restart(self, restart: outputs.Restart) -> None:
        self.is_restarting = True
        self.stop()

    def _ends(self, stop: outputs.Stop) -> None:
        parts = "" if stop.stage is None else f"; look at {self.run_state.parts_of(stop.stage)}"
        logs = [f"; {self.members[each].account}" for each in self.node.state.out if each in self.members]
        self.fail(WorkerFailedError("".join([stop.text, parts, *logs]), stop.exit_code))

    def _fails(self, failed: outputs.Fail) -> None:
        member = self.members[failed.worker]
        member.state = "failed"
        self.fail(self.run_state.error_of(member, failed.last, has_commit=failed.has_commit))

    def _release(self, release: outputs.Release) -> None:
        """Lets all workers leave at once; if a worker is missing, first waits for the last messages of the others."""
        self.newcomers.stop()
        self.end_workers(ends.let_end, _LAST_WORDS_NS if release.cut_short else _LEAVE_GRACE_NS)

    def _tell_stop(self, stop: ends.StopWorkers) -> None:
        self.node.handle(Stopping(now_ns()))
        self.broadcast(StopMessage())
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

    def look_at_clock(self) -> None:
        """Runs the work of a tick: pictures, store, leases, deadlines of the protocol, pings."""
        self.tick(self)
        if not self._has_finished:  # then the store is no longer needed
            with self.failing():
                while self._to_strike_off:
                    self.node.strike_off(self._to_strike_off.pop())
                self.node.renew(now_ns())
                self.node.report(now_ns())
        if self.recorder.answers:  # else workers wait for the disk, and this time is not watched
            self.decide(Passed(now_ns(), self.injector.places(), *sights_of(self.members.values(), self._board)))
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
        super().interrupt(number, step_grace_s)
        self.newcomers.stop()
        self.tick(self)

    def _hand_over(self) -> None:
        """Leaves the run to the other hosts, when all workers of this one have left; ends it if all hosts are to go."""
        if self._is_ending:
            return
        others = any(each.exit_code is None for each in self.members.values())
        if self.num_notices and others and not self.own_living:
            raise HandedOverError
        if self.own_host and nobody_takes_over(self.node.state):
            self.run_state.note("all workers have a notice, and no other one can take over: the run ends")
            self._end_after_step(signal.SIGTERM, min(_STEP_OF_ALL_S, self.grace_ns / 2e9))

    def close(self) -> None:
        """Completes the records and the run state after every worker has ended, if they are not started again."""
        if self.is_to_restart:
            return
        with self.failing():
            self._own_parts.close()
        self.origin = self._revive(self)
        if self.origin is None:
            self.injector.close()


_CARRY_OUT: dict[type[outputs.CoordinatorOutput | HostOutput], Callable[[Agent, Any], object]] = {
    outputs.Tell: Agent._tell,
    outputs.Write: Agent._write,
    outputs.Kill: lambda agent, kill: agent.end_workers(ends.kill, kill.worker),
    outputs.Note: lambda agent, note: agent.run_state.note(note.text),
    outputs.Reached: lambda agent, reached: agent.injector.reached(reached.phase, reached.epoch),
    outputs.Arm: lambda agent, arm: agent.injector.arm(),
    outputs.Restart: Agent._restart,
    outputs.Stop: Agent._ends,
    outputs.Fail: Agent._fails,
    outputs.Release: Agent._release,
    ends.StopWorkers: Agent._tell_stop,
    ends.EndStep: lambda agent, order: agent.decide(Notice(now_ns(), None, order.grace_ns)),
    ends.KillWorker: EndsOfRun.kill,
    ends.LeaveBehind: EndsOfRun.leave_behind,
}
