"""The agent: hears the workers of this host, has the coordinator decide, and tells the workers what was decided.

A worker that ends before it may is dead by its pidfd's word; what another worker says of it is only a suspicion. Nobody
listens to a worker that is out. A failure that the others cannot make good is the run's: its first cause is kept, then
everyone is told to stop, and killed if they do not in time. `supervisor.py` is the loop that calls this.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence

from engine.core.errors import (
    BambooError,
    CoordinatorUnavailableError,
    ExitCode,
    WorkerFailedError,
)
from engine.core.fault import Fault
from engine.core.job import Job
from engine.core.membership_effects import Effect, Halt, PublishEpoch
from engine.core.membership_events import (
    Done,
    Event,
    ExitSeen,
    Heartbeat,
    Inventory,
    Joined,
    Notice,
    PlanAcknowledged,
    StepCommitted,
    Suspicion,
    Tick,
)
from engine.core.membership_verdicts import in_words
from engine.runtime.account import Account, error_of
from engine.runtime.injector import Injector
from engine.runtime.link import Message
from engine.runtime.node import Node
from engine.runtime.orders import Orders
from engine.runtime.progress_board import ProgressBoard
from engine.runtime.raised import RaisedErrors
from engine.runtime.recorder import Recorder, now_ns
from engine.runtime.roster import Member

_STOP_GRACE_S = 3.0
_START_GRACE_S = 0.3
_INTERRUPT_GRACE_S = 10.0

AGENT = -1  # stands for the agent where events name a worker

_NOT_RECOVERED = "training did not recover: "


class Agent:
    """Runs one job to its end, over members that have been started."""

    def __init__(
        self,
        job: Job,
        members: dict[int, Member],
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
        self.account = Account(job)
        self.orders = Orders(job, members, recorder, self.account)
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self.deadline_s = float("inf")
        self._grace_ns = round(grace_s * 1e9)
        self.injector = Injector(job, faults, members, recorder, board, lambda: node.state)
        self._raised = RaisedErrors()
        self._seen_ns: dict[int, int] = {}
        self._to_strike_off: list[int] = []
        self._stopping = False

    def hear(self, member: Member, message: Message) -> None:
        """Takes in what a worker says, unless it is out: it may not know yet, and what it says counts for nothing."""
        if member.worker in self.node.state.out:
            return
        with self._failing():
            _HANDLERS[message["kind"]](self, member, message)

    def sees_end(self, member: Member) -> None:
        """Notes when a worker was seen to have ended; how, the fork server says, which has seen it too."""
        self._seen_ns[member.worker] = now_ns()

    def exited(self, member: Member, code: int) -> None:
        """Takes in how a worker's process has ended."""
        member.exit_code = code
        is_out = member.worker in self.node.state.out
        expected = is_out or member.state in ("finished", "failed") or self._stopping
        seen_ns = self._seen_ns.get(member.worker, now_ns())
        self.recorder.event("exit", of=member.worker, code=code, expected=expected, seen_ns=seen_ns)
        if not expected or (is_out and code < 0):
            member.state = "dead"
        elif is_out or member.state == "finished":
            member.state = "left"
        self.injector.exit_seen(member.worker, code)
        self._tell(ExitSeen(now_ns(), member.worker, code))
        self._to_strike_off.append(member.worker)  # with the next tick: everybody waits for the epoch now

    def _tell(self, event: Event) -> None:
        """Has the coordinator decide on an event, and does what it says. A run that is ending needs no decisions."""
        with self._failing():
            if not self._stopping:
                for effect in self.node.handle(event):
                    self._carry_out(effect)

    def _carry_out(self, effect: Effect) -> None:
        if isinstance(effect, Halt):
            self._halt(effect)
        elif isinstance(effect, PublishEpoch) and effect.verdict and not self.account.going_at_ns:
            self.fail(self._ended_by(_NOT_RECOVERED + in_words(dict(effect.verdict))))  # nobody can take over yet
        elif not self._stopping:
            self.injector.begins(effect)
            self.orders.carry_out(effect, self.node.state)
            self.injector.has_begun(effect)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Makes an error of the coordinator, or of the account, the end of the run."""
        try:
            yield
        except BambooError as error:
            self.fail(error)

    def look_at_clock(self) -> None:
        """Does what is due: pictures, leases, deadlines, signs of life."""
        self.tick(self)
        with self._failing():
            while self._to_strike_off:
                self.node.strike_off(self._to_strike_off.pop())
            self.node.renew(now_ns())
            self.node.report(now_ns())
        self._tell(Tick(now_ns()))
        self.orders.broadcast("ping")

    def close(self) -> None:
        """Closes the account when every worker has ended."""
        self.injector.close()
        with self._failing():
            self.account.close_book()

    def fail(self, cause: BambooError) -> None:
        """Keeps the first cause and stops everyone."""
        if self.cause is None:
            if isinstance(cause, CoordinatorUnavailableError):
                cause = CoordinatorUnavailableError(f"{cause}; {self.account.progress()}")
            self.cause = cause
            self.recorder.event("failed", error=str(cause))
        self._stop()

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self.orders.broadcast("stop")
            # Before training begins, workers may be forming a group that cannot be left; there is nothing to lose yet.
            self.deadline_s = time.monotonic() + (_STOP_GRACE_S if self.account.going_at_ns else _START_GRACE_S)

    def overdue(self) -> None:
        """The grace has passed: to stop, or to end a step that was interrupted."""
        if self._stopping:
            for member in self.members.values():
                if member.exit_code is None:
                    member.child.signal(signal.SIGKILL)
            self.deadline_s = float("inf")
        else:
            self._stop()

    def interrupt(self, number: signal.Signals) -> None:
        """The first signal lets the step end; a second one, or one before the first step, stops at once."""
        again = self.interrupted is not None
        self.interrupted = self.interrupted or number
        self.recorder.event("interrupt", signal=number.name)
        if again or not self.account.going_at_ns:
            self._stop()
        elif not self._stopping:
            self._tell(Notice(now_ns(), None, round(_INTERRUPT_GRACE_S * 1e9)))
            self.deadline_s = time.monotonic() + _INTERRUPT_GRACE_S

    def _on_partition(self, member: Member, message: Message) -> None:
        self.account.cut(message)
        self.recorder.event("partition", starts=message["starts"], layers=message["layers"])
        self.orders.broadcast("partition", starts=message["starts"])

    def _on_border(self, member: Member, message: Message) -> None:
        self.orders.broadcast("border", stage=message["stage"], specs=message["specs"])

    def _on_ready(self, member: Member, message: Message) -> None:
        member.state = "ready"
        self._tell(Joined(now_ns(), member.worker, self.node.name))

    def _on_heartbeat(self, member: Member, message: Message) -> None:
        at = (message["epoch"], message["step"], message["index"], message["inside"])
        self._tell(Heartbeat(now_ns(), member.worker, *at))

    def _on_vote(self, member: Member, message: Message) -> None:
        commit = self.account.vote(member.worker, message)
        if commit is not None:
            self.orders.decided = commit
            self._tell(StepCommitted(now_ns(), message["epoch"], commit.step, self.account.shadows))

    def _on_audit(self, member: Member, message: Message) -> None:
        self.account.audit(member.worker, message)
        fields = {name: message[name] for name in ("step", "pipeline", "rows")}
        self.recorder.event("audit", of=member.worker, **fields)

    def _on_validation(self, member: Member, message: Message) -> None:
        self.account.validated(message)
        self.recorder.event("validation", step=message["step"], loss=message["loss"], metric=message["metric"])
        self.orders.broadcast("validated", step=message["step"])

    def _on_finished(self, member: Member, message: Message) -> None:
        member.state = "finished"
        member.peak_stash = {(pipeline, stage): peak for pipeline, stage, peak in message["peak_stash"]}
        member.peak_memory_kib = message["peak_memory_kib"]
        self.recorder.event(
            "finished", of=member.worker, peak_stash=message["peak_stash"], peak_memory_kib=member.peak_memory_kib
        )
        self._tell(Done(now_ns(), member.worker, message["epoch"]))

    def _on_suspicion(self, member: Member, message: Message) -> None:
        self.recorder.event("suspicion", of=member.worker, text=message["text"])
        self._tell(Suspicion(now_ns(), member.worker, message["epoch"]))

    def _on_failed(self, member: Member, message: Message) -> None:
        going = self.account.going_at_ns > 0 and not self._stopping
        if going and self._raised.is_survivable(member.worker, message, self.node.state):
            self.recorder.event("raised", of=member.worker, step=message["step"], error=message["what"])
            self.injector.sees(member.worker, "raised", message["what"])
            return  # its end is the sign that counts
        member.state = "failed"
        self.fail(error_of(member, message))

    def _on_inventory(self, member: Member, message: Message) -> None:
        self.injector.reached("inventory", message["epoch"])
        self._tell(Inventory(now_ns(), member.worker, message["epoch"], message["holds"]))

    def _on_planned(self, member: Member, message: Message) -> None:
        lost = tuple(message["lost_stages"])
        self._tell(PlanAcknowledged(now_ns(), member.worker, message["epoch"], message["digest"], lost))

    def _on_notice(self, member: Member, message: Message) -> None:
        grace_ns = self.injector.grace_ns(member.worker) or self._grace_ns
        self.recorder.event("notice", of=member.worker, grace_s=grace_ns / 1e9)
        self.injector.sees(member.worker, "notice", f"{grace_ns / 1e9:g} s")
        self._tell(Notice(now_ns(), member.worker, grace_ns))

    def _on_fault(self, member: Member, message: Message) -> None:
        self.injector.hear(member.worker, message)

    def _ended_by(self, text: str) -> WorkerFailedError:
        """Returns the error that ends the run, with where to read on about everyone who is out."""
        out = [self.members[worker] for worker in self.node.state.out]
        logs = [f"worker {each.worker} (pid {each.child.pid}) wrote {each.log}" for each in out]
        return WorkerFailedError("; ".join([text, *logs]))

    def _halt(self, effect: Halt) -> None:
        if not self.account.going_at_ns:  # whatever else it says, nobody had anything to lose yet
            self.fail(self._ended_by(_NOT_RECOVERED + in_words(self.node.state.out)))
            return
        error = self._ended_by(effect.reason)
        error.exit_code = ExitCode(effect.exit_code)
        self.fail(error)


_HANDLERS: dict[str, Callable[[Agent, Member, Message], None]] = {
    "partition": Agent._on_partition,
    "border": Agent._on_border,
    "ready": Agent._on_ready,
    "vote": Agent._on_vote,
    "audit": Agent._on_audit,
    "validation": Agent._on_validation,
    "finished": Agent._on_finished,
    "failed": Agent._on_failed,
    "suspicion": Agent._on_suspicion,
    "heartbeat": Agent._on_heartbeat,
    "inventory": Agent._on_inventory,
    "planned": Agent._on_planned,
    "notice": Agent._on_notice,
    "strike": Agent._on_fault,
    "suffered": Agent._on_fault,
    "mark": Agent._on_fault,
}
