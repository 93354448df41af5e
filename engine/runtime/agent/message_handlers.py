"""The agent's handlers of worker messages: each makes an event, an entry in the run state, or a message to all workers.

Rule: messages of a worker that is out are ignored; the worker may not know yet that it is out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TypeVar

from engine.core import messages
from engine.core.history.process_records import UnprovenRecord
from engine.core.history.run_records import (
    AuditRecord,
    FinishedRecord,
    NoticeRecord,
    PartitionRecord,
    RaisedRecord,
    StaysRecord,
    SuspicionRecord,
    ValidationRecord,
)
from engine.core.membership.events import (
    Done,
    Heartbeat,
    InventoryReceived,
    Joined,
    Notice,
    PlanAcknowledged,
    StepCommitted,
    Suspicion,
)
from engine.core.membership.verdicts import unable_to_leave
from engine.core.message_codec import Message, ToAgent
from engine.core.process_messages import KeyMessage, UnprovenMessage
from engine.core.texts import numbered
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.run_state import error_of
from engine.runtime.agent.worker_handles import WorkerHandle
from engine.runtime.ipc.recorder import now_ns

Heard = TypeVar("Heard", bound=ToAgent)
Handle = Callable[[Agent, WorkerHandle, Heard], None]

_HANDLERS: dict[type[Message], Handle[Any]] = {}


def dispatch(agent: Agent, member: WorkerHandle, message: Message) -> None:
    """Handles a message of a worker; an error of the run ends the run."""
    if member.worker in agent.node.state.out:
        return
    with agent.failing():
        _HANDLERS[type(message)](agent, member, message)


def _handles(kind: type[Heard]) -> Callable[[Handle[Heard]], Handle[Heard]]:
    """Registers the function below as the handler of a kind of message."""

    def register(handle: Handle[Heard]) -> Handle[Heard]:
        _HANDLERS[kind] = handle
        return handle

    return register


@_handles(messages.CutMessage)
def _on_cut(agent: Agent, member: WorkerHandle, cut: messages.CutMessage) -> None:
    agent.run_state.cut(cut)
    agent.recorder.write(PartitionRecord(starts=cut.starts, layers=cut.layers))
    agent.effects.broadcast(messages.PartitionMessage(cut.starts))


@_handles(messages.BorderMessage)
def _on_border(agent: Agent, member: WorkerHandle, border: messages.BorderMessage) -> None:
    agent.effects.broadcast(border)


@_handles(KeyMessage)
def _on_key(agent: Agent, member: WorkerHandle, key: KeyMessage) -> None:
    agent.effects.broadcast(key)


@_handles(messages.PureMessage)
def _on_pure(agent: Agent, member: WorkerHandle, pure: messages.PureMessage) -> None:
    agent.run_state.purity.add(member.worker, pure.rows)


@_handles(messages.ReadyMessage)
def _on_ready(agent: Agent, member: WorkerHandle, ready: messages.ReadyMessage) -> None:
    member.state = "ready"
    agent.decide(Joined(now_ns(), member.worker, agent.node.name))


@_handles(messages.HeartbeatMessage)
def _on_heartbeat(agent: Agent, member: WorkerHandle, at: messages.HeartbeatMessage) -> None:
    agent.decide(Heartbeat(now_ns(), member.worker, at.epoch, at.step, at.index, at.inside))


@_handles(messages.VoteMessage)
def _on_vote(agent: Agent, member: WorkerHandle, vote: messages.VoteMessage) -> None:
    ownership = agent.run_state.ownership
    commit = agent.run_state.vote(member.worker, vote)
    if commit is not None and ownership is not None:
        agent.effects.decided(commit)
        event = StepCommitted(now_ns(), vote.epoch, commit.step, ownership.shadows)
        agent.decide(*agent.preparation.at_commit(event, agent.node.state, ownership))


@_handles(messages.AuditMessage)
def _on_audit(agent: Agent, member: WorkerHandle, audit: messages.AuditMessage) -> None:
    agent.run_state.audit(member.worker, audit)
    rows = tuple(row[:3] for row in audit.rows)  # the marks only explain a difference between replicas
    agent.recorder.write(AuditRecord(of=member.worker, step=audit.step, pipeline=audit.pipeline, rows=rows))


@_handles(messages.ValidationMessage)
def _on_validation(agent: Agent, member: WorkerHandle, outcome: messages.ValidationMessage) -> None:
    agent.run_state.validated(outcome)
    agent.recorder.write(ValidationRecord(step=outcome.step, loss=outcome.loss, metric=outcome.metric))
    agent.effects.broadcast(messages.ValidatedMessage(outcome.step))


@_handles(messages.FinishedMessage)
def _on_finished(agent: Agent, member: WorkerHandle, finished: messages.FinishedMessage) -> None:
    member.state = "finished"
    member.peak_stash = {(pipeline, stage): peak for pipeline, stage, peak in finished.peak_stash}
    member.peak_memory_kib = finished.peak_memory_kib
    peak_stash, peak_memory_kib = finished.peak_stash, finished.peak_memory_kib
    agent.recorder.write(FinishedRecord(of=member.worker, peak_stash=peak_stash, peak_memory_kib=peak_memory_kib))
    agent.decide(Done(now_ns(), member.worker, finished.epoch))


@_handles(messages.SuspicionMessage)
def _on_suspicion(agent: Agent, member: WorkerHandle, suspicion: messages.SuspicionMessage) -> None:
    agent.recorder.write(SuspicionRecord(of=member.worker, text=suspicion.text, peer=suspicion.peer))
    agent.decide(Suspicion(now_ns(), member.worker, suspicion.epoch, suspicion.peer))


@_handles(UnprovenMessage)
def _on_unproven(agent: Agent, member: WorkerHandle, unproven: UnprovenMessage) -> None:
    agent.recorder.write(UnprovenRecord(of=member.worker, peer=unproven.peer, text=unproven.text))
    who = "another worker" if unproven.peer is None else f"worker {unproven.peer}"
    again = f"worker {member.worker} forms its group again, which may hold an unknown process"
    agent.run_state.note(f"{again}: {who} {unproven.text}")


@_handles(messages.RaisedMessage)
def _on_raised(agent: Agent, member: WorkerHandle, raised: messages.RaisedMessage) -> None:
    exception, is_training = raised.exception, agent.run_state.going_at_ns > 0
    step = raised.step if is_training else -1
    agent.recorder.write(RaisedRecord(at_ns=raised.at_ns, of=member.worker, step=step, **asdict(exception)))
    if not agent.is_stopping:
        is_of_job = not is_training and exception.place  # every worker would raise it
        words = exception.at_start() if is_of_job else f"worker {member.worker} {exception.in_step(step)}"
        agent.run_state.note("\n  ".join([f"{words}; full text in {member.log}", *exception.frames.splitlines()]))
        if is_training and agent.raised.is_survivable(member.worker, raised, agent.node.state):
            agent.injector.sees(member.worker, "raised", exception.error)
            return  # the end of its process makes the verdict
    _on_failed(agent, member, raised)


def _on_failed(
    agent: Agent, member: WorkerHandle, last: messages.RefusedMessage | messages.FailedMessage | messages.RaisedMessage
) -> None:
    member.state = "failed"
    agent.fail(error_of(member, last, has_commit=bool(agent.run_state.losses)))


_handles(messages.RefusedMessage)(_on_failed)
_handles(messages.FailedMessage)(_on_failed)


@_handles(messages.InventoryMessage)
def _on_inventory(agent: Agent, member: WorkerHandle, inventory: messages.InventoryMessage) -> None:
    agent.injector.reached("inventory", inventory.epoch)
    agent.decide(InventoryReceived(now_ns(), member.worker, inventory.epoch, inventory.holds, inventory.whole))


@_handles(messages.PlannedMessage)
def _on_planned(agent: Agent, member: WorkerHandle, planned: messages.PlannedMessage) -> None:
    agent.decide(PlanAcknowledged(now_ns(), member.worker, planned.epoch, planned.digest, planned.lost_stages))


@_handles(messages.PreparedMessage)
def _on_prepared(agent: Agent, member: WorkerHandle, prepared: messages.PreparedMessage) -> None:
    agent.preparation.answered(member.worker, prepared.number, prepared.digest)


@_handles(messages.NoticeMessage)
def _on_notice(agent: Agent, member: WorkerHandle, notice: messages.NoticeMessage) -> None:
    grace_ns = agent.injector.grace_ns(member.worker) or agent.grace_ns
    agent.recorder.write(NoticeRecord(of=member.worker, grace_s=grace_ns / 1e9))
    agent.injector.sees(member.worker, "notice", f"{grace_ns / 1e9:g} s")
    agent.preparation.noticed(member.worker, grace_ns)
    agent.decide(Notice(now_ns(), member.worker, grace_ns))
    for worker, stages in unable_to_leave(agent.node.state).items():
        grace_s = (agent.injector.grace_ns(worker) or agent.grace_ns) / 1e9
        text = f"is to leave within {grace_s:g} s, but no other worker can take over {numbered('stage', stages)}"
        if agent.run_state.note(f"worker {worker} {text}"):
            agent.recorder.write(StaysRecord(of=worker, text=text))


@_handles(messages.StrikeMessage)
def _on_strike(agent: Agent, member: WorkerHandle, strike: messages.StrikeMessage) -> None:
    agent.injector.strike(strike.fault)


@_handles(messages.SufferedMessage)
def _on_suffered(agent: Agent, member: WorkerHandle, suffered: messages.SufferedMessage) -> None:
    agent.injector.sees(member.worker, "suffered", suffered.how, suffered.fault)


@_handles(messages.MarkMessage)
def _on_mark(agent: Agent, member: WorkerHandle, mark: messages.MarkMessage) -> None:
    agent.injector.reached(mark.phase, mark.epoch)
