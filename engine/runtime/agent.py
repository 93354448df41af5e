"""The agent: hears the workers of this host, has the coordinator decide, and tells the workers what was decided.

A worker that ends before it may is dead by its pidfd's word; what another worker says of it is only a suspicion. The
first cause of a failure is kept as the reason; then everyone is told to stop, and killed if they do not in time.
`supervisor.py` is the loop that calls this.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from engine.core.commit import Commit as Committed
from engine.core.errors import (
    BambooError,
    CoordinatorUnavailableError,
    ExitCode,
    WorkerFailedError,
)
from engine.core.job import Job
from engine.core.membership_effects import (
    Commit,
    Effect,
    Evict,
    Fence,
    Finish,
    Halt,
    Look,
    PublishEpoch,
    StartTraining,
)
from engine.core.membership_events import (
    Done,
    Event,
    ExitSeen,
    Heartbeat,
    Joined,
    Notice,
    StepCommitted,
    Suspicion,
    Tick,
)
from engine.runtime.account import Account, error_of
from engine.runtime.link import Message
from engine.runtime.node import Node
from engine.runtime.recorder import Recorder, now_ns
from engine.runtime.roster import Member

_STOP_GRACE_S = 3.0
_START_GRACE_S = 0.3
_INTERRUPT_GRACE_S = 10.0

AGENT = -1  # stands for the agent where events name a worker


class Agent:
    """Runs one job to its end, over members that have been started."""

    def __init__(
        self,
        job: Job,
        members: dict[int, Member],
        recorder: Recorder,
        node: Node,
        tick: Callable[[], None],
    ):
        self.members = members
        self.recorder = recorder
        self.node = node
        self.tick = tick
        self.account = Account(job)
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self._epoch = 0
        self._seen_ns: dict[int, int] = {}
        self._commit: Committed | None = None
        self.deadline_s = float("inf")
        self._stopping = False

    def hear(self, member: Member, message: Message) -> None:
        """Takes in what a worker says."""
        with self._failing():
            _HANDLERS[message["kind"]](self, member, message)

    def sees_end(self, member: Member) -> None:
        """Notes when a worker was seen to have ended; how, the fork server says, which has seen it too."""
        self._seen_ns[member.worker] = now_ns()

    def exited(self, member: Member, code: int) -> None:
        """Takes in how a worker's process has ended."""
        member.exit_code = code
        expected = member.state in ("finished", "failed") or self._stopping
        seen_ns = self._seen_ns.get(member.worker, now_ns())
        self.recorder.event("exit", of=member.worker, code=code, expected=expected, seen_ns=seen_ns)
        member.state = "dead" if not expected else "left" if member.state == "finished" else member.state
        self._tell(ExitSeen(now_ns(), member.worker, code))
        with self._failing():
            self.node.strike_off(member.worker)

    def _tell(self, event: Event) -> None:
        """Has the coordinator decide on an event, and does what it says. A run that is ending needs no decisions."""
        with self._failing():
            if not self._stopping:
                for effect in self.node.handle(event):
                    _EFFECTS[type(effect)](self, effect)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Makes an error of the coordinator, or of the account, the end of the run."""
        try:
            yield
        except BambooError as error:
            self.fail(error)

    def look_at_clock(self) -> None:
        """Does what is due: pictures, leases, deadlines, signs of life."""
        self.tick()
        with self._failing():
            self.node.renew(now_ns())
            self.node.report(now_ns())
        self._tell(Tick(now_ns()))
        self._broadcast("ping")

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for member in self.members.values():
            member.link.send(kind, **fields)

    def close(self) -> None:
        """Closes the account when every worker has ended."""
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
            self._broadcast("stop")
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
        self._broadcast("partition", starts=message["starts"])

    def _on_border(self, member: Member, message: Message) -> None:
        self._broadcast("border", stage=message["stage"], specs=message["specs"])

    def _on_ready(self, member: Member, message: Message) -> None:
        member.state = "ready"
        self._tell(Joined(now_ns(), member.worker, self.node.name))

    def _on_heartbeat(self, member: Member, message: Message) -> None:
        at = (message["epoch"], message["step"], message["index"], message["inside"])
        self._tell(Heartbeat(now_ns(), member.worker, *at))

    def _on_vote(self, member: Member, message: Message) -> None:
        commit = self.account.vote(message)
        if commit is not None:
            self._commit = commit
            self._tell(StepCommitted(now_ns(), message["epoch"], commit.step))

    def _on_audit(self, member: Member, message: Message) -> None:
        self.account.audit(message)
        self.recorder.event("audit", of=member.worker, step=message["step"], rows=message["rows"])

    def _on_validation(self, member: Member, message: Message) -> None:
        self.account.validated(message)
        self.recorder.event("validation", step=message["step"], loss=message["loss"], metric=message["metric"])

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
        member.state = "failed"
        self.fail(error_of(member, message))

    def _publish_epoch(self, effect: PublishEpoch) -> None:
        if effect.epoch > self._epoch:
            self._epoch = effect.epoch
            self.recorder.event("epoch", **asdict(effect))
            self._broadcast("epoch", epoch=effect.epoch, members=effect.members, owners=effect.owners)

    def _start_training(self, effect: StartTraining) -> None:
        if not self.account.going_at_ns:
            self.account.going_at_ns = now_ns()
            self.recorder.event("go")
            for member in self.members.values():
                member.state = "running"
            self._broadcast("go")

    def _send_commit(self, effect: Commit) -> None:
        commit, self._commit = self._commit, None
        if commit is not None:  # else the order is repeated because nothing moves, and everybody has it
            assert commit.step == effect.step
            self.account.settle(commit)
            self._broadcast("commit", step=commit.step, clip_factor=commit.clip_factor, last=effect.then == "end")
            self.recorder.event("commit", **asdict(commit))

    def _evict(self, effect: Evict) -> None:
        self.members[effect.worker].child.signal(signal.SIGKILL)

    def _halt(self, effect: Halt) -> None:
        out = [self.members[worker] for worker in self.node.state.out]
        logs = [f"worker {each.worker} (pid {each.child.pid}) wrote {each.log}" for each in out]
        error = WorkerFailedError("; ".join([effect.reason, *logs]))
        error.exit_code = ExitCode(effect.exit_code)
        self.fail(error)

    def _finish(self, effect: Finish) -> None:
        self._broadcast("bye")

    def _need_not(self, effect: Effect) -> None:
        """What it orders is done anyway: the loop watches every process, and a link has one reader only."""


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
}

_EFFECTS: dict[type[Effect], Callable[[Agent, Any], None]] = {
    PublishEpoch: Agent._publish_epoch,
    StartTraining: Agent._start_training,
    Commit: Agent._send_commit,
    Evict: Agent._evict,
    Halt: Agent._halt,
    Finish: Agent._finish,
    Look: Agent._need_not,
    Fence: Agent._need_not,
}
