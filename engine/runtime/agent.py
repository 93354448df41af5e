"""The agent: supervises the workers of this host and holds the coordinator's role in a run on one machine.

One loop waits on everything: the workers' links, their pidfds, the fork server, signals and the clock. A worker that
ends before it may is dead by the pidfd's word; what another worker says of it is only a suspicion. The first cause
is kept as the reason; then everyone is told to stop, and killed if they do not within the grace.
"""

from __future__ import annotations

import contextlib
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.core.audit import AuditBook
from engine.core.commit import Ballot, Vote
from engine.core.errors import (
    BambooError,
    DivergedError,
    ExitCode,
    InvariantError,
    Problem,
    UserError,
    WorkerFailedError,
)
from engine.core.job import Job
from engine.core.trajectory import Row
from engine.runtime.children import ForkServer
from engine.runtime.interrupts import Interrupts
from engine.runtime.link import Message
from engine.runtime.recorder import Recorder, now_ns
from engine.runtime.roster import Member

_TICK_S = 0.25
_STOP_GRACE_S = 3.0
_INTERRUPT_GRACE_S = 10.0
_SUSPICION_GRACE_S = 5.0

AGENT = -1  # stands for the agent where events name a worker


@dataclass(slots=True)
class Account:
    """What a run has come to so far; the agent writes it, pictures and results are made of it."""

    layers: list[str] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    validations: dict[int, tuple[float, float | None]] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    going_at_ns: int = 0
    first_commit_at_ns: int = 0


class Agent:
    """Runs one job to its end, over members that have been started."""

    def __init__(
        self, job: Job, members: dict[int, Member], server: ForkServer, recorder: Recorder, tick: Callable[[], None]
    ):
        self.job = job
        self.members = members
        self.server = server
        self.recorder = recorder
        self.tick = tick
        self.account = Account()
        self.cause: BambooError | None = None
        self.interrupted: signal.Signals | None = None
        self._ballot = Ballot(job.pipelines, job.stages, job.clip_norm)
        self._book: AuditBook | None = None
        self._suspicions: list[str] = []
        self._deadline_s = float("inf")
        self._stopping = False

    def run(self, interrupts: Interrupts) -> None:
        """Serves until every worker has ended; afterwards `cause` and `interrupted` say how it went."""
        with selectors.DefaultSelector() as selector:
            selector.register(interrupts, selectors.EVENT_READ, lambda: self._interrupt(interrupts.take()))
            selector.register(self.server.link, selectors.EVENT_READ, self._note_exit)
            for member in self.members.values():
                self._watch(selector, member)
            ticked_s = 0.0
            while self.server.has_early_exits():
                self._note_exit()
            while any(member.exit_code is None for member in self.members.values()):
                now_s = time.monotonic()
                for key, _ in selector.select(max(0.0, min(_TICK_S, self._deadline_s - now_s))):
                    # What was ready may have been dealt with by what came before it in this round.
                    if key.fileobj in selector.get_map():
                        with contextlib.suppress(BlockingIOError):
                            key.data()
                now_s = time.monotonic()
                if now_s >= self._deadline_s:
                    self._overdue()
                if now_s - ticked_s >= _TICK_S:
                    ticked_s = now_s
                    self.tick()
        self._close_book()

    def _watch(self, selector: selectors.BaseSelector, member: Member) -> None:
        def ended() -> None:
            selector.unregister(member.child.pidfd)
            # What it said before it ended comes first. Something that it started itself may still hold its link open:
            # then nothing is left to receive, which is no end of the link.
            while member.link in selector.get_map():
                spoken()

        def spoken() -> None:
            message = member.link.receive()
            if message is None:
                selector.unregister(member.link)
            else:
                _HANDLERS[message["kind"]](self, member, message)

        selector.register(member.child.pidfd, selectors.EVENT_READ, ended)
        selector.register(member.link, selectors.EVENT_READ, spoken)

    def _note_exit(self) -> None:
        """The fork server reports how a child ended."""
        message = self.server.next_exit()
        if message is None:
            for member in self.members.values():
                member.exit_code = -signal.SIGKILL if member.exit_code is None else member.exit_code
            self._fail(InvariantError("the fork server has ended, and with it every worker"))
            return
        for member in self.members.values():
            if member.child.pid == message["pid"]:
                self._exited(member, message["code"])

    def _exited(self, member: Member, code: int) -> None:
        member.exit_code = code
        expected = member.state in ("finished", "failed") or self._stopping
        self.recorder.event("exit", of=member.worker, code=code, expected=expected)
        if expected:
            member.state = "left" if member.state == "finished" else member.state
            return
        member.state = "dead"
        self._fail(
            WorkerFailedError(
                f"worker {member.worker} (pid {member.child.pid}) {member.describe_end()}; see {member.log}"
            )
        )

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for member in self.members.values():
            member.link.send(kind, **fields)

    def _fail(self, cause: BambooError) -> None:
        """Keeps the first cause and stops everyone."""
        if self.cause is None:
            self.cause = cause
            self.recorder.event("failed", error=str(cause))
        self._stop()

    def _stop(self) -> None:
        if not self._stopping:
            self._stopping = True
            self._broadcast("stop")
            self._deadline_s = time.monotonic() + _STOP_GRACE_S

    def _overdue(self) -> None:
        """The deadline has passed: of a suspicion nobody died of, of an interrupted step, or of the grace to stop."""
        if self._stopping:
            for member in self.members.values():
                if member.exit_code is None:
                    member.child.signal(signal.SIGKILL)
            self._deadline_s = float("inf")
        elif self.interrupted is not None:
            self._stop()
        else:
            self._fail(WorkerFailedError(f"{self._suspicions[0]}, but no worker has died"))

    def _interrupt(self, number: signal.Signals) -> None:
        """The first signal lets the step end; a second one, or one before the first step, stops at once."""
        again = self.interrupted is not None
        self.interrupted = self.interrupted or number
        self.recorder.event("interrupt", signal=number.name)
        if again or not self.account.going_at_ns:
            self._stop()
        elif not self._stopping:
            self._deadline_s = time.monotonic() + _INTERRUPT_GRACE_S

    def _on_partition(self, member: Member, message: Message) -> None:
        self.account.layers = message["layers"]
        self.account.starts = message["starts"]
        self._book = AuditBook(len(message["layers"]), self.job.pipelines)
        self.recorder.event("partition", starts=message["starts"], layers=message["layers"])
        self._broadcast("partition", starts=message["starts"])

    def _on_border(self, member: Member, message: Message) -> None:
        self._broadcast("border", stage=message["stage"], specs=message["specs"])

    def _on_ready(self, member: Member, message: Message) -> None:
        member.state = "ready"
        if all(each.state == "ready" for each in self.members.values()):
            self.account.going_at_ns = now_ns()
            self.recorder.event("go")
            for each in self.members.values():
                each.state = "running"
            self._broadcast("go")

    def _on_vote(self, member: Member, message: Message) -> None:
        vote = Vote(
            message["step"], message["pipeline"], message["stage"], dict(map(tuple, message["norms"])), message["loss"]
        )
        commit = self._ballot.add(vote)
        if commit is None:
            return
        # Everyone who voted for this step has told the hashes of the one before.
        self._close_book()
        last = self.interrupted is not None or commit.step == self.job.steps - 1
        self._broadcast("commit", step=commit.step, clip_factor=commit.clip_factor, last=last)
        self.account.losses.append(commit.loss)
        self.account.first_commit_at_ns = self.account.first_commit_at_ns or now_ns()
        self.recorder.event("commit", **asdict(commit))

    def _close_book(self) -> None:
        if self._book is None or not self.account.losses:
            return
        step = len(self.account.losses) - 1
        try:
            self.account.rows += self._book.close(step, self.account.losses[-1])
        except InvariantError as error:
            self._fail(error)

    def _on_audit(self, member: Member, message: Message) -> None:
        assert self._book is not None
        self._book.add(message["pipeline"], {layer: (state, buffers) for layer, state, buffers in message["rows"]})
        self.recorder.event("audit", of=member.worker, step=message["step"], rows=message["rows"])

    def _on_validation(self, member: Member, message: Message) -> None:
        self.account.validations[message["step"]] = (message["loss"], message["metric"])
        self.recorder.event("validation", step=message["step"], loss=message["loss"], metric=message["metric"])

    def _on_finished(self, member: Member, message: Message) -> None:
        member.state = "finished"
        member.peak_stash = {(pipeline, stage): peak for pipeline, stage, peak in message["peak_stash"]}
        member.peak_memory_kib = message["peak_memory_kib"]
        self.recorder.event(
            "finished", of=member.worker, peak_stash=message["peak_stash"], peak_memory_kib=member.peak_memory_kib
        )
        if all(each.state == "finished" for each in self.members.values()):
            self._broadcast("bye")

    def _on_suspicion(self, member: Member, message: Message) -> None:
        self._suspicions.append(f"worker {member.worker}: {message['text']}")
        self.recorder.event("suspicion", of=member.worker, text=message["text"])
        if not self._stopping:
            self._deadline_s = min(self._deadline_s, time.monotonic() + _SUSPICION_GRACE_S)

    def _on_failed(self, member: Member, message: Message) -> None:
        member.state = "failed"
        self._fail(_failure(member, message))


def _failure(member: Member, message: Message) -> BambooError:
    """Returns what a worker said of its end as the error that it is."""
    if "problems" in message:
        return UserError(Problem(*problem) for problem in message["problems"])
    who = f"worker {member.worker} (pid {member.child.pid})"
    if "traceback" in message:
        return WorkerFailedError(f"{who} raised\n{message['traceback'].rstrip()}")
    if message["code"] == ExitCode.EXPECTATION_FAILED:
        return DivergedError(f"{who}: {message['error']}")
    error = BambooError(f"{who}: {message['error']}")
    error.exit_code = ExitCode(message["code"])
    return error


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
}
