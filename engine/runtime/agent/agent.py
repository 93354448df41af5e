"""The agent: sees what becomes of the workers of this host, has the coordinator decide, and tells what was decided.

A worker that ends before it may is dead by its pidfd's word; what another worker says of it is only a suspicion. A
failure that the others cannot make good is the run's: its first cause is kept, then everyone is told to stop, and
killed if they do not in time. The end of a run that has finished has the same deadlines; a process that not even
SIGKILL ends is named and left behind. `message_handlers.py` takes in what workers say, `event_loop.py` is the loop
that calls both.
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
    EnvironmentLacksError,
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
    StoreSilentRecord,
)
from engine.core.membership.effects import Effect, Finish, Halt, PublishEpoch
from engine.core.membership.events import Event, ExitSeen, Notice, Tick
from engine.core.membership.state import Phase
from engine.core.messages import ExitMessage
from engine.core.process_messages import ByeMessage, PingMessage, StopMessage
from engine.runtime.agent.effect_executor import EffectExecutor
from engine.runtime.agent.injector import Injector
from engine.runtime.agent.node import Node
from engine.runtime.agent.preparation import HandOverPreparation
from engine.runtime.agent.run_state import RunState
from engine.runtime.agent.worker_errors import WorkerErrors
from engine.runtime.agent.worker_handles import RendezvousStore, WorkerHandle
from engine.runtime.ipc.progress_board import ProgressBoard
from engine.runtime.ipc.recorder import Recorder, now_ns

_STOP_GRACE_S = 3.0
_LEAVE_GRACE_S = 2.0  # after everybody was let go
_LAST_WORDS_S = 1.0  # where somebody is missing after the last commit: for what the others still know of that step
_KILL_GRACE_S = 5.0  # until a process that was killed is left behind
_START_GRACE_S = 0.3
_INTERRUPT_GRACE_S = 10.0

AGENT = -1  # stands for the agent where events name a worker

_NOT_RECOVERED = "training did not recover: "


class Agent:
    """Runs one job to its end, over members that have been started."""

    def __init__(
        self,
        job: Job,
        members: dict[int, WorkerHandle],
        recorder: Recorder,
        node: Node,
        store: RendezvousStore,
        tick: Callable[[Agent], None],
        *,
        grace_s: float = 120.0,
        faults: Sequence[Fault] = (),
        board: ProgressBoard | None = None,
    ):
        self.members = members
        self.recorder = recorder
        self.node = node
        self.store = store
        self.tick = tick
        self.run_state = RunState(job)
        self.effects = EffectExecutor(job, members, recorder, self.run_state, store)
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self.deadline_s = float("inf")
        self.grace_ns = round(grace_s * 1e9)
        self.preparation = HandOverPreparation(self.effects.prepare)
        self.injector = Injector(job, faults, members, recorder, board, lambda: node.state)
        self.raised = WorkerErrors()
        self._seen_ns: dict[int, int] = {}
        self._to_strike_off: list[int] = []
        self.is_stopping = False
        self._is_let_go = False
        self._has_killed = False

    @property
    def _has_finished(self) -> bool:
        return self.node.state.phase is Phase.FINISHED

    def sees_end(self, member: WorkerHandle) -> None:
        """Notes when a worker was seen to have ended, and tells the others that much before anything else is done.

        What comes of it the coordinator decides.
        """
        if member.worker not in self._seen_ns:
            self._seen_ns[member.worker] = now_ns()
            if not self._may_end(member):
                self.effects.broadcast(ExitMessage(member.worker))

    def _may_end(self, member: WorkerHandle) -> bool:
        is_out = member.worker in self.node.state.out
        return is_out or member.state in ("finished", "failed") or self.is_stopping or self._has_finished

    def exited(self, member: WorkerHandle, code: int) -> None:
        """Takes in how a worker's process has ended."""
        self.sees_end(member)
        member.exit_code = code
        is_out, expected = member.worker in self.node.state.out, self._may_end(member)
        seen_ns = self._seen_ns[member.worker]
        self.recorder.write(ExitRecord(of=member.worker, code=code, expected=expected, seen_ns=seen_ns))
        if not expected or (is_out and code < 0):
            member.state = "dead"
        elif is_out or member.state == "finished" or self._has_finished:
            member.state = "left"
        self.injector.exit_seen(member.worker, code)
        self.decide(ExitSeen(now_ns(), member.worker, code))
        self._to_strike_off.append(member.worker)  # with the next tick: everybody waits for the epoch now

    def replaces_store(self) -> bool:
        """Has another rendezvous store follow one that has ended, and says whether there is one.

        The next epoch names it; a group that cannot be formed for want of it is a suspicion, and so makes an epoch.
        """
        with self.failing():
            if (
                not self.run_state.going_at_ns
            ):  # the first group may be half formed, and nobody has anything to lose yet
                raise EnvironmentLacksError(
                    f"the rendezvous store (pid {self.store.child.pid}) was ended before training began: start the run "
                    f"again; if that happens twice, see {self.store.log} and `bamboo doctor`"
                )
            if not self.is_stopping:
                self.store.start_again()
                return True
        return False

    def decide(self, *events: Event) -> None:
        """Has the coordinator decide on events, as one, and does what it says; a run that is ending needs nothing.

        Then whoever has to prepare for the coming commit is told so.
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
            self.fail(self._ended_by(_NOT_RECOVERED + in_words(effect.verdict)))  # nobody can take over yet
        elif not self.is_stopping:
            self.injector.begins(effect)
            self.effects.execute(effect, self.node.state)
            self.injector.has_begun(effect)

    def _finish(self, effect: Finish) -> None:
        """Lets everybody go at once, or, where somebody is missing, when the others have said what they know."""
        if not effect.cut_short:
            self.effects.broadcast(ByeMessage())
        if self._is_let_go:
            return
        self._is_let_go = True
        if effect.cut_short:
            self.recorder.write(CutShortRecord(reason=effect.cut_short))
            self.run_state.note(f"every step is committed; what follows the last one ends early: {effect.cut_short}")
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
        """Does what is due: pictures, leases, deadlines, signs of life."""
        self.tick(self)
        if self.store.look():
            self.recorder.write(StoreSilentRecord(child=self.store.child.pid))
        if not self._has_finished:  # there is nothing left that anybody need know, or the store could spoil
            with self.failing():
                while self._to_strike_off:
                    self.node.strike_off(self._to_strike_off.pop())
                self.node.renew(now_ns())
                self.node.report(now_ns())
        self.decide(Tick(now_ns()))
        self.effects.broadcast(PingMessage())

    def close(self) -> None:
        """Closes the run state when every worker has ended."""
        self.injector.close()
        with self.failing():
            self.run_state.close_book()

    def fail(self, cause: BambooError) -> None:
        """Keeps the first cause and stops everyone."""
        if self.cause is None:
            if isinstance(cause, CoordinatorUnavailableError):
                cause = CoordinatorUnavailableError(f"{cause}; {self.run_state.progress()}")
            self.cause = cause
            self.recorder.write(FailedRecord(error=str(cause)))
        self._stop()

    def _stop(self) -> None:
        if not self.is_stopping:
            self.is_stopping = True
            self.effects.broadcast(StopMessage())
            # Before training begins, workers may be forming a group that cannot be left; there is nothing to lose yet.
            self.deadline_s = time.monotonic() + (_STOP_GRACE_S if self.run_state.going_at_ns else _START_GRACE_S)

    def overdue(self) -> None:
        """The grace has passed: to end a step that was interrupted, or to leave; to stop; or to be gone."""
        if not self.is_stopping:
            self._stop()
            return
        for member in self.members.values():
            if member.exit_code is None and self._has_killed:
                self._leaves_behind(member)
            elif member.exit_code is None:
                self.recorder.write(KilledRecord(of=member.worker, why="it did not end when it was to"))
                member.child.signal(signal.SIGKILL)
        self.deadline_s = float("inf") if self._has_killed else time.monotonic() + _KILL_GRACE_S
        self._has_killed = True

    def _leaves_behind(self, member: WorkerHandle) -> None:
        member.is_left_behind = True
        self.recorder.write(LeftBehindRecord(of=member.worker, child=member.child.pid))
        self.run_state.note(
            f"worker {member.worker} (pid {member.child.pid}) does not end by SIGKILL and is left behind"
        )

    def interrupt(self, number: signal.Signals) -> None:
        """The first signal lets the step end; a second one, or one before the first step, stops at once."""
        again = self.interrupted is not None
        self.interrupted = self.interrupted or number
        self.recorder.write(InterruptRecord(signal=number.name))
        if again or not self.run_state.going_at_ns:
            self._stop()
        elif not self.is_stopping:
            self.decide(Notice(now_ns(), None, round(_INTERRUPT_GRACE_S * 1e9)))
            self.deadline_s = min(self.deadline_s, time.monotonic() + _INTERRUPT_GRACE_S)

    def _ended_by(self, text: str) -> WorkerFailedError:
        """Returns the error that ends the run, with where to read on about everyone who is out."""
        out = [self.members[worker] for worker in self.node.state.out]
        logs = [f"worker {each.worker} (pid {each.child.pid}) wrote {each.log}" for each in out]
        return WorkerFailedError("; ".join([text, *logs]))

    def _halt(self, effect: Halt) -> None:
        if not self.run_state.going_at_ns:  # whatever else it says, nobody had anything to lose yet
            self.fail(self._ended_by(_NOT_RECOVERED + in_words(self.node.state.out.values())))
            return
        error = self._ended_by(effect.reason)
        error.exit_code = ExitCode(effect.exit_code)
        self.fail(error)
