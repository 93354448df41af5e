"""The agent: watches the workers of this host, lets the coordinator decide, and carries out its decisions.

    dead worker      agent                                  other workers
    exits ---------> ExitMessage ------------------------>  record it; nothing is decided yet
                     verdict, written to the store
                     EpochMessage ----------------------->  leave every wait and freeze
                     <------------------- InventoryMessage  report their replicas; begin to form a new group
                     plan document, written to the store
                     PlanMessage ------------------------>  make the plan
                     <--------------------- PlannedMessage  report its digest
                     GoMessage -------------------------->  run the rest of the step
                     <------------------------ VoteMessage  every replica is ready for the optimizer
                     CommitMessage ---------------------->  run the optimizer

Rules: the pidfd of a worker proves that the worker has ended; the message of another worker is only a suspicion. If the
other workers cannot replace a failed worker, the run fails: the agent keeps the first cause, tells every worker to
stop, and kills the remaining workers after a deadline. A finished run has the same deadlines. A process that survives
SIGKILL is recorded and left behind. `message_handlers.py` handles the messages of workers, `event_loop.py` calls both.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from engine.core.config.job import Job
from engine.core.errors import (
    BambooError,
    CoordinatorUnavailableError,
    ExitCode,
    WorkerFailedError,
)
from engine.core.exclusion import in_words
from engine.core.faults.fault import Fault
from engine.core.history.process_records import (
    CutShortRecord,
    ExitRecord,
    FailedRecord,
    InterruptRecord,
    KilledRecord,
    LeftBehindRecord,
)
from engine.core.membership.effects import Effect, Evict, Finish, Halt, PublishEpoch
from engine.core.membership.events import Event, ExitSeen, Notice, Sighted, Tick
from engine.core.membership.state import Phase
from engine.core.messages import ExitMessage
from engine.core.process_messages import ByeMessage, PingMessage, StopMessage
from engine.runtime.agent.effect_executor import EffectExecutor
from engine.runtime.agent.injector import Injector
from engine.runtime.agent.node import Node
from engine.runtime.agent.preparation import HandOverPreparation
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.worker_errors import WorkerErrors
from engine.runtime.agent.worker_handles import WorkerHandle, sight_of
from engine.runtime.agent.worker_verdicts import WorkerVerdicts
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns

_STOP_GRACE_S = 3.0
_LEAVE_GRACE_S = 2.0  # from the permission to leave to the end of all workers
_LAST_WORDS_S = 1.0  # the same, for the last messages if a worker is missing after the last commit
_KILL_GRACE_S = 5.0  # from SIGKILL until a process is left behind
_START_GRACE_S = 0.3
_FINDINGS = (ExitCode.EXPECTATION_FAILED, ExitCode.INTERNAL)  # errors that an interrupt does not explain


_NOT_RECOVERED = "training did not recover: "


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
        self.effects = EffectExecutor(job, members, recorder, self.run_state)
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self.deadline_s = float("inf")
        self.grace_ns = round(grace_s * 1e9)
        self.preparation = HandOverPreparation(self.effects.prepare)
        self.injector = Injector(job, faults, members, recorder, board, lambda: node.state)
        self.raised = WorkerErrors()
        self._verdicts = WorkerVerdicts(self.effects.grid, members, self.run_state, board, self.injector.has_struck)
        self._seen_ns: dict[int, int] = {}
        self._to_strike_off: list[int] = []
        self.is_stopping = False
        self._is_let_go = False
        self._has_killed = False

    @property
    def _has_finished(self) -> bool:
        return self.node.state.phase is Phase.FINISHED

    def sees_end(self, member: WorkerHandle) -> None:
        """Records the time at which a worker's end was seen, and announces it before the coordinator decides."""
        if member.worker not in self._seen_ns:
            self._seen_ns[member.worker] = now_ns()
            if not self._may_end(member):
                self.effects.broadcast(ExitMessage(member.worker))

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
        self.decide(ExitSeen(now_ns(), member.worker, code, self.raised.of(member.worker)))
        self._to_strike_off.append(member.worker)  # at the next tick: the workers wait for the epoch now

    def decide(self, *events: Event) -> None:
        """Lets the coordinator decide on events as one transaction, and carries out its effects.

        Then lets the workers prepare the epoch of the coming commit. A run that is ending ignores events.
        """
        with self.failing():
            if not self.is_stopping:
                for effect in self.node.handle(*events):
                    self._carry_out(effect)
                self.preparation.look(self.node.state, self.run_state.ownership)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Halt):
            self._halt(effect)
        elif isinstance(effect, Finish):
            self._finish(effect)
        elif isinstance(effect, PublishEpoch) and effect.verdict and not self.run_state.going_at_ns:
            self.fail(self._ended_by(_NOT_RECOVERED + in_words(effect.verdict)))  # before training there are no heirs
        elif not self.is_stopping or isinstance(effect, Evict):
            self.injector.begins(effect)
            self.effects.execute(effect, self.node.state)
            self.injector.has_begun(effect)
            if isinstance(effect, PublishEpoch) and effect.verdict:
                self._told_verdict()

    def _told_verdict(self) -> None:
        if cause := self._verdicts.repeated(self.node.state):
            self.fail(self._ended_by(cause))
        else:
            self._verdicts.tell(self.node.state)

    def _finish(self, effect: Finish) -> None:
        """Lets all workers leave at once; if a worker is missing, first waits for the last messages of the others."""
        if not effect.cut_short:
            self.effects.broadcast(ByeMessage())
        if self._is_let_go:
            return
        self._is_let_go = True
        if effect.cut_short:
            self.recorder.write(CutShortRecord(reason=effect.cut_short))
            self.run_state.note(f"every step is committed; the work after the last one ends early: {effect.cut_short}")
        grace_s = _LAST_WORDS_S if effect.cut_short else _LEAVE_GRACE_S
        self.deadline_s = min(self.deadline_s, time.monotonic() + grace_s)

    @contextlib.contextmanager
    def failing(self) -> Iterator[None]:
        """Makes an error of the coordinator, of the run state or of a store the end of the run."""
        try:
            yield
        except BambooError as error:
            self.fail(error)

    def look_at_clock(self) -> None:
        """Runs the work of a tick: pictures, store, leases, deadlines of the protocol, pings."""
        self.tick(self)
        if not self._has_finished:  # then the store is no longer needed
            with self.failing():
                while self._to_strike_off:
                    self.node.strike_off(self._to_strike_off.pop())
                self.node.renew(now_ns())
                self.node.report(now_ns())
        self.decide(*self._sights(), Tick(now_ns()))
        self.effects.broadcast(PingMessage())

    def _sights(self) -> Iterator[Sighted]:
        """Yields a look at each worker that has not ended."""
        for member in self.members.values():
            if self._board and member.exit_code is None and (sight := sight_of(member, self._board, now_ns())):
                yield Sighted(now_ns(), member.worker, sight)

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
            self.effects.broadcast(StopMessage())
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
            self.decide(Notice(now_ns(), None, round(step_grace_s * 1e9)))
        self.tick(self)

    def _ended_by(self, text: str, exit_code: int | None = None) -> WorkerFailedError:
        """Returns the error that ends the run, with the log of every worker that is out."""
        out = [self.members[worker] for worker in self.node.state.out]
        logs = [f"worker {each.worker} (pid {each.child.pid}) wrote {each.log}" for each in out]
        return WorkerFailedError("; ".join([text, *logs]), exit_code)

    def _halt(self, effect: Halt) -> None:
        if not self.run_state.going_at_ns:  # no training is lost, so only the verdict counts
            self.fail(self._ended_by(_NOT_RECOVERED + in_words(self.node.state.out.values())))
            return
        cause = self._verdicts.repeated(self.node.state)
        self.fail(self._ended_by(cause) if cause else self._ended_by(effect.reason, effect.exit_code))
