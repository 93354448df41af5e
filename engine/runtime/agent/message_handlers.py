"""The agent's own part in a message of a worker, for results, pictures and faults; the coordinator has the others."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.core import messages
from engine.core.checkpoints.part_messages import KeptMessage, UnkeptMessage
from engine.core.faults.injection_state import ToldMoment
from engine.core.history.elastic_records import PaceRecord
from engine.core.message_codec import Message
from engine.core.process_messages import BusyMessage, LinkWantedMessage, PureMessage
from engine.core.recovery.plan_messages import InventoryMessage
from engine.core.recovery.vote import VoteMessage
from engine.runtime.agent.checkpoints import Checkpoints
from engine.runtime.agent.injector import Injector
from engine.runtime.agent.run_state import RunState, audit_record
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.ipc.link_pairs import LinkPairs
from engine.runtime.ipc.recorder import Recorder


@dataclass(frozen=True, slots=True)
class OwnParts:
    """The agent's own parts in the messages of the workers of a run."""

    run_state: RunState
    recorder: Recorder
    injector: Injector
    checkpoints: Checkpoints
    pairs: LinkPairs

    def take(self, member: WorkerHandle, message: Message) -> bool:
        """Handles the agent's part in a message; returns whether that is all, and no matter of the coordinator.

        Raises the errors of the run that the message shows.
        """
        if (take := _OWN_PARTS.get(type(message))) is not None:
            take(self, member, message)
        return isinstance(message, KeptMessage | UnkeptMessage | BusyMessage | LinkWantedMessage)

    def close(self) -> None:
        """Completes the results after the end of every worker."""
        self.run_state.close_book()
        self.checkpoints.close()


def _on_ready(own: OwnParts, member: WorkerHandle, ready: messages.ReadyMessage) -> None:
    member.state, member.busy = "ready", BusyMessage()


def _on_waiting(own: OwnParts, member: WorkerHandle, waiting: messages.WaitingMessage) -> None:
    member.state, member.busy = "waiting", BusyMessage()


def _on_busy(own: OwnParts, member: WorkerHandle, busy: BusyMessage) -> None:
    member.busy = busy


def _on_audit(own: OwnParts, member: WorkerHandle, audit: messages.AuditMessage) -> None:
    own.run_state.audit(member.worker, audit)
    own.recorder.write(audit_record(member.worker, audit))


def _on_vote(own: OwnParts, member: WorkerHandle, vote: VoteMessage) -> None:
    own.run_state.vote(member.worker, vote)
    for each in own.run_state.computed(member.worker, vote):
        own.recorder.write(PaceRecord(of=each.worker, step=each.step, slowness=each.slowness, why=each.why))


def _on_finished(own: OwnParts, member: WorkerHandle, finished: messages.FinishedMessage) -> None:
    member.state = "finished"
    member.peak_stash = {(pipeline, stage): peak for pipeline, stage, peak in finished.peak_stash}
    member.peak_memory_kib = finished.peak_memory_kib


def _on_raised(own: OwnParts, member: WorkerHandle, raised: messages.RaisedMessage) -> None:
    exception, step = raised.exception, raised.step if own.run_state.going_at_ns else -1
    is_of_job = step < 0 and exception.place  # every worker would raise it
    told = own.run_state.at_start(exception) if is_of_job else f"worker {member.worker} {exception.in_step(step)}"
    own.run_state.note("\n  ".join([f"{told}; full text in {member.log}", *exception.frames.splitlines()]))


_OWN_PARTS: dict[type[Message], Callable[[OwnParts, WorkerHandle, Any], object]] = {
    LinkWantedMessage: lambda own, member, wanted: own.pairs.link(member, wanted),
    messages.CutMessage: lambda own, member, cut: own.run_state.cut(cut),
    PureMessage: lambda own, member, pure: own.run_state.purity.add(member.worker, pure.rows),
    BusyMessage: _on_busy,
    messages.ReadyMessage: _on_ready,
    messages.WaitingMessage: _on_waiting,
    VoteMessage: _on_vote,
    messages.AuditMessage: _on_audit,
    messages.ValidationMessage: lambda own, member, outcome: own.run_state.validated(outcome),
    messages.FinishedMessage: _on_finished,
    messages.RaisedMessage: _on_raised,
    InventoryMessage: lambda own, member, told: own.injector.reached("inventory", told.epoch),
    KeptMessage: lambda own, member, told: own.checkpoints.kept(told),
    UnkeptMessage: lambda own, member, told: own.checkpoints.unkept(told),
    messages.StrikeMessage: lambda own, member, told: own.injector.strike(
        told.fault, ToldMoment(member.worker, told.step, told.done)
    ),
    messages.SufferedMessage: lambda own, member, told: own.injector.sees(
        member.worker, "suffered", told.how, told.fault
    ),
    messages.MarkMessage: lambda own, member, mark: own.injector.reached(mark.phase, mark.epoch),
}
