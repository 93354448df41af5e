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

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from engine.core.config.job import Job
from engine.core.coordinator import orders, outputs
from engine.core.coordinator.inputs import CoordinatorInput, Ended, Heard, Interrupted, Noticed, Passed, Stopping
from engine.core.errors import BambooError, CoordinatorUnavailableError, ExitCode, WorkerFailedError
from engine.core.faults.fault import Fault
from engine.core.history.process_records import (
    ExitRecord,
    FailedRecord,
    InterruptRecord,
    KilledRecord,
    LeftBehindRecord,
)
from engine.core.history.run_records import GoRecord
from engine.core.membership.state import Phase
from engine.core.message_codec import Message, ToWorker
from engine.core.messages import ExitMessage, NoticeMessage, RaisedMessage
from engine.core.process_messages import PingMessage, StopMessage
from engine.runtime.agent.injector import Injector
from engine.runtime.agent.message_handlers import OwnParts
from engine.runtime.agent.node import Node
from engine.runtime.agent.run_state import RunState, error_of
from engine.runtime.agent.worker_handles import WorkerHandle, sights_of, tell_all
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns

_STOP_GRACE_S = 3.0
_LEAVE_GRACE_S = 2.0  # from the permission to leave to the end of all workers
_LAST_WORDS_S = 1.0  # the same, for the last messages if a worker is missing after the last commit
_KILL_GRACE_S = 5.0  # from SIGKILL until a process is left behind
_START_GRACE_S = 0.3
_FINDINGS = (ExitCode.EXPECTATION_FAILED, ExitCode.INTERNAL)  # errors that an interrupt does not explain


class Agent:
    """Runs one job to its end on workers that have been started."""

    def __init__(
        self,
        job: Job,
        members: dict[int, WorkerHandle],
        recorder: Recorder,
        node: Node,
        tick: Callable[[Agent], None],
        *,
        grace_s: float = 120.0,
        faults: Sequence[Fault] = (),
        board: ProgressBoard | None = None,
    ):
        self.members = members
        self.recorder = recorder
        self.node = node
        self.tick = tick
        self._board = board
        self.run_state = RunState(job)
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self.deadline_s = float("inf")
        self.grace_ns = round(grace_s * 1e9)
        self.injector = Injector(job, faults, members, recorder, board, lambda: node.state)
        self._own_parts = OwnParts(self.run_state, recorder, self.injector)
        self._told_ns = 0  # before the message that was sent last for the present input, if no record has followed
        self._seen_ns: dict[int, int] = {}
        self._to_strike_off: list[int] = []
        self.is_stopping = False
        self._has_killed = False

    @property
    def _has_finished(self) -> bool:
        return self.node.state.phase is Phase.FINISHED

    def hear(self, member: WorkerHandle, message: Message) -> None:
        """Handles a message of a worker; one of a worker that is out is ignored, as it may not know that it is out."""
        worker = member.worker
        with self.failing():
            if worker in self.node.state.out:
                return
            if not (self.is_stopping and isinstance(message, RaisedMessage)):  # a consequence of the end
                self._own_parts.take(member, message)
            if isinstance(message, NoticeMessage):
                grace_ns = self.injector.grace_ns(worker) or self.grace_ns
                self.decide(Noticed(now_ns(), worker, grace_ns))
                self.injector.sees(worker, "notice", f"{grace_ns / 1e9:g} s")
                return
            found = self.decide(Heard(now_ns(), worker, message, self.node.name))
            if isinstance(message, RaisedMessage) and not any(isinstance(each, outputs.Fail) for each in found):
                self.injector.sees(worker, "raised", message.exception.error)

    def sees_end(self, member: WorkerHandle) -> None:
        """Records the time at which a worker's end was seen, and announces it before the coordinator decides."""
        if member.worker not in self._seen_ns:
            self._seen_ns[member.worker] = now_ns()
            if not self._may_end(member):
                self.broadcast(ExitMessage(member.worker))

    def _may_end(self, member: WorkerHandle) -> bool:
        is_out = member.worker in self.node.state.out
        return is_out or member.state in ("finished", "failed") or self.is_stopping or self._has_finished

    def exited(self, member: WorkerHandle, code: int) -> None:
        """Handles the end of a worker's process."""
        self.sees_end(member)
        member.exit_code = code
        out, expected = self.node.state.out.get(member.worker), self._may_end(member)
        seen_ns = self._seen_ns[member.worker]
        self.recorder.write(ExitRecord(of=member.worker, code=code, expected=expected, seen_ns=seen_ns))
        if not expected or (out is not None and out.is_loss):
            member.state = "dead"
        elif out is not None or member.state == "finished" or self._has_finished:
            member.state = "left"
        self.injector.exit_seen(member.worker, code)
        self.decide(Ended(now_ns(), member.worker, code, self.injector.places().get(member.worker)))
        self._to_strike_off.append(member.worker)  # at the next tick: the workers wait for the epoch now

    def decide(self, given: CoordinatorInput) -> tuple[outputs.CoordinatorOutput, ...]:
        """Lets the coordinator decide on an input as one transaction; carries out its outputs and returns them."""
        found: tuple[outputs.CoordinatorOutput, ...] = ()
        with self.failing():
            owners = self.node.coordination.owners
            found = self.node.handle(given)
            if self.node.coordination.owners != owners:
                ownership = self.node.coordination.ownership
                for worker in self.node.state.members:
                    self.members[worker].slots = ownership.slots_of(worker)
            self._told_ns = 0
            for output in found:
                _CARRY_OUT[type(output)](self, output)
        return found

    def broadcast(self, message: ToWorker) -> None:
        """Sends a message to every live worker."""
        self._tell(orders.tell_all(self.node.coordination, message))

    def _tell(self, tell: outputs.Tell) -> None:
        self._told_ns = now_ns()
        tell_all((self.members[worker] for worker in tell.workers if worker in self.members), tell.message)

    def _write(self, write: outputs.Write) -> None:
        record = replace(write.record, at_ns=write.record.at_ns or self._told_ns or now_ns())
        self._told_ns = 0
        if self.run_state.books(record):
            self.recorder.write(record)
        if isinstance(record, GoRecord):
            for worker in self.node.state.members:
                self.members[worker].state = "running"

    def _kill(self, kill: outputs.Kill) -> None:
        if self.members[kill.worker].exit_code is None:
            self.members[kill.worker].child.signal(signal.SIGKILL)

    def _note(self, note: outputs.Note) -> None:
        self.run_state.note(note.text)

    def _ends(self, stop: outputs.Stop) -> None:
        parts = "" if stop.stage is None else f"; look at {self.run_state.parts_of(stop.stage)}"
        out = [self.members[worker] for worker in self.node.state.out]
        logs = [f"worker {each.worker} (pid {each.child.pid}) wrote {each.log}" for each in out]
        self.fail(WorkerFailedError("; ".join([stop.text + parts, *logs]), stop.exit_code))

    def _fails(self, failed: outputs.Fail) -> None:
        member = self.members[failed.worker]
        member.state = "failed"
        self.fail(error_of(member, failed.last, has_commit=failed.has_commit))

    def _release(self, release: outputs.Release) -> None:
        """Lets all workers leave at once; if a worker is missing, first waits for the last messages of the others."""
        grace_s = _LAST_WORDS_S if release.cut_short else _LEAVE_GRACE_S
        self.deadline_s = min(self.deadline_s, time.monotonic() + grace_s)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Makes an error of the coordinator, of the run state or of a store the end of the run."""
        try:
            yield
        except BambooError as error:
            self.fail(error)

    @property
    def due_s(self) -> float:
        """The time of the next deadline or late work of a fault."""
        return min(self.deadline_s, self.injector.due_ns / 1e9)

    def look_at_deadlines(self) -> None:
        """Does the late work of faults that is due, and handles a deadline that has passed."""
        self.injector.look_at_clock()
        if time.monotonic() >= self.deadline_s:
            self.overdue()

    def look_at_clock(self) -> None:
        """Runs the work of a tick: pictures, store, leases, deadlines of the protocol, pings."""
        self.tick(self)
        if not self._has_finished:  # then the store is no longer needed
            with self.failing():
                while self._to_strike_off:
                    self.node.strike_off(self._to_strike_off.pop())
                self.node.renew(now_ns())
                self.node.report(now_ns())
        self.decide(Passed(now_ns(), self.injector.places(), sights_of(self.members.values(), self._board)))
        self.broadcast(PingMessage())

    def close(self) -> None:
        """Completes the records and the run state after every worker has ended."""
        self.injector.close()
        with self.failing():
            self.run_state.close_book()

    def fail(self, cause: BambooError) -> None:
        """Keeps the first cause and stops every worker; an interrupted run has nothing to recover."""
        if self.cause is None and (self.interrupted is None or cause.exit_code in _FINDINGS):
            if isinstance(cause, CoordinatorUnavailableError):
                cause = CoordinatorUnavailableError(f"{cause}; {self.run_state.progress()}")
            self.cause = cause
            self.recorder.write(FailedRecord(error=str(cause), notice=cause.notice))
        self._stop()

    def _stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            self.node.handle(Stopping(now_ns()))
            self.broadcast(StopMessage())
            # Before training, workers may be blocked in forming a group; killing them early loses no work.
            grace_s = _STOP_GRACE_S if self.run_state.going_at_ns else _START_GRACE_S
            latest_s = float("inf") if self.interrupted is None else self.deadline_s
            self.deadline_s = min(latest_s, time.monotonic() + grace_s)

    def overdue(self) -> None:
        """Handles a deadline that has passed: stops the run, then kills its workers, then leaves them behind."""
        if not self.is_stopping and self.interrupted is None:
            self._stop()
            return
        self.is_stopping = True
        self.node.handle(Stopping(now_ns()))
        why = "it did not end before its deadline" if self.interrupted is None else "the run was interrupted"
        for member in self.members.values():
            if member.exit_code is None and self._has_killed:
                self._leaves_behind(member)
            elif member.exit_code is None:
                self.recorder.write(KilledRecord(of=member.worker, why=why))
                member.child.signal(signal.SIGKILL)
        self.deadline_s = float("inf") if self._has_killed else time.monotonic() + _KILL_GRACE_S
        self._has_killed = True

    def _leaves_behind(self, member: WorkerHandle) -> None:
        member.is_left_behind = True
        self.recorder.write(LeftBehindRecord(of=member.worker, child=member.child.pid))
        self.run_state.note(
            f"worker {member.worker} (pid {member.child.pid}) does not end by SIGKILL and is left behind"
        )

    def interrupt(self, number: signal.Signals, step_grace_s: float) -> None:
        """Ends the run after the open step; without it after `step_grace_s`, at a second signal, before training."""
        again = self.interrupted is not None
        self.interrupted = self.interrupted or number
        self.recorder.write(InterruptRecord(signal=number.name))
        if again and not self._has_killed:
            self.overdue()
        elif not self.run_state.going_at_ns:
            self._stop()
        elif not again:
            self.deadline_s = min(self.deadline_s, time.monotonic() + step_grace_s)
            self.decide(Interrupted(now_ns(), round(step_grace_s * 1e9)))
        self.tick(self)


_CARRY_OUT: dict[type[outputs.CoordinatorOutput], Callable[[Agent, Any], None]] = {
    outputs.Tell: Agent._tell,
    outputs.Write: Agent._write,
    outputs.Kill: Agent._kill,
    outputs.Note: Agent._note,
    outputs.Reached: lambda agent, reached: agent.injector.reached(reached.phase, reached.epoch),
    outputs.Arm: lambda agent, arm: agent.injector.arm(),
    outputs.Stop: Agent._ends,
    outputs.Fail: Agent._fails,
    outputs.Release: Agent._release,
}
