"""The agent's answer to each kind of message: an event to decide on, an entry in the account, a message to all.

Rule: a message of a worker that is out counts for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from engine.core import messages
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
    Inventory,
    Joined,
    Notice,
    PlanAcknowledged,
    StepCommitted,
    Suspicion,
)
from engine.core.membership.verdicts import held_back, stages_in_words
from engine.core.message_codec import Message, ToAgent
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.run_state import error_of
from engine.runtime.agent.worker_handles import Member
from engine.runtime.ipc.recorder import now_ns

Heard = TypeVar("Heard", bound=ToAgent)
Handle = Callable[[Agent, Member, Heard], None]

_HANDLERS: dict[type[Message], Handle[Any]] = {}


def hear(agent: Agent, member: Member, message: Message) -> None:
    """Takes in a message of a worker; one of a worker that is out counts for nothing: it may not know yet."""
    if member.worker in agent.node.state.out:
        return
    with agent.failing():
        _HANDLERS[type(message)](agent, member, message)


def _handles(kind: type[Heard]) -> Callable[[Handle[Heard]], Handle[Heard]]:
    """Registers the function below for a kind of message."""

    def register(handle: Handle[Heard]) -> Handle[Heard]:
        _HANDLERS[kind] = handle
        return handle

    return register


@_handles(messages.Cut)
def _on_cut(agent: Agent, member: Member, cut: messages.Cut) -> None:
    agent.account.cut(cut)
    agent.recorder.write(PartitionRecord(starts=cut.starts, layers=cut.layers))
    agent.orders.broadcast(messages.Partition(cut.starts))


@_handles(messages.Border)
def _on_border(agent: Agent, member: Member, border: messages.Border) -> None:
    agent.orders.broadcast(border)


@_handles(messages.Pure)
def _on_pure(agent: Agent, member: Member, pure: messages.Pure) -> None:
    agent.account.purity.add(member.worker, pure.rows)


@_handles(messages.Ready)
def _on_ready(agent: Agent, member: Member, ready: messages.Ready) -> None:
    member.state = "ready"
    agent.decide(Joined(now_ns(), member.worker, agent.node.name))


@_handles(messages.Heartbeat)
def _on_heartbeat(agent: Agent, member: Member, at: messages.Heartbeat) -> None:
    agent.decide(Heartbeat(now_ns(), member.worker, at.epoch, at.step, at.index, at.inside))


@_handles(messages.Vote)
def _on_vote(agent: Agent, member: Member, vote: messages.Vote) -> None:
    ownership = agent.account.ownership
    commit = agent.account.vote(member.worker, vote)
    if commit is not None and ownership is not None:
        agent.orders.decided(commit)
        event = StepCommitted(now_ns(), vote.epoch, commit.step, ownership.shadows)
        agent.decide(*agent.preparation.at_commit(event, agent.node.state, ownership))


@_handles(messages.Audit)
def _on_audit(agent: Agent, member: Member, audit: messages.Audit) -> None:
    agent.account.audit(member.worker, audit)
    rows = tuple(row[:3] for row in audit.rows)  # marks are for replicas that disagree
    agent.recorder.write(AuditRecord(of=member.worker, step=audit.step, pipeline=audit.pipeline, rows=rows))


@_handles(messages.Validation)
def _on_validation(agent: Agent, member: Member, outcome: messages.Validation) -> None:
    agent.account.validated(outcome)
    agent.recorder.write(ValidationRecord(step=outcome.step, loss=outcome.loss, metric=outcome.metric))
    agent.orders.broadcast(messages.Validated(outcome.step))


@_handles(messages.Finished)
def _on_finished(agent: Agent, member: Member, finished: messages.Finished) -> None:
    member.state = "finished"
    member.peak_stash = {(pipeline, stage): peak for pipeline, stage, peak in finished.peak_stash}
    member.peak_memory_kib = finished.peak_memory_kib
    peak_stash, peak_memory_kib = finished.peak_stash, finished.peak_memory_kib
    agent.recorder.write(FinishedRecord(of=member.worker, peak_stash=peak_stash, peak_memory_kib=peak_memory_kib))
    agent.decide(Done(now_ns(), member.worker, finished.epoch))


@_handles(messages.Suspicion)
def _on_suspicion(agent: Agent, member: Member, suspicion: messages.Suspicion) -> None:
    agent.recorder.write(SuspicionRecord(of=member.worker, text=suspicion.text))
    agent.decide(Suspicion(now_ns(), member.worker, suspicion.epoch))


@_handles(messages.Raised)
def _on_raised(agent: Agent, member: Member, raised: messages.Raised) -> None:
    going = agent.account.going_at_ns > 0 and not agent.is_stopping
    if going and agent.raised.is_survivable(member.worker, raised, agent.node.state):
        agent.recorder.write(RaisedRecord(of=member.worker, step=raised.step, error=raised.error))
        agent.injector.sees(member.worker, "raised", raised.error)
        return  # its end is the sign that counts
    _on_failed(agent, member, raised)


def _on_failed(agent: Agent, member: Member, last: messages.Refused | messages.Failed | messages.Raised) -> None:
    member.state = "failed"
    agent.fail(error_of(member, last))


_handles(messages.Refused)(_on_failed)
_handles(messages.Failed)(_on_failed)


@_handles(messages.Inventory)
def _on_inventory(agent: Agent, member: Member, inventory: messages.Inventory) -> None:
    agent.injector.reached("inventory", inventory.epoch)
    agent.decide(Inventory(now_ns(), member.worker, inventory.epoch, inventory.holds, inventory.whole))


@_handles(messages.Planned)
def _on_planned(agent: Agent, member: Member, planned: messages.Planned) -> None:
    agent.decide(PlanAcknowledged(now_ns(), member.worker, planned.epoch, planned.digest, planned.lost_stages))


@_handles(messages.Prepared)
def _on_prepared(agent: Agent, member: Member, prepared: messages.Prepared) -> None:
    agent.preparation.answered(member.worker, prepared.number, prepared.digest)


@_handles(messages.Notice)
def _on_notice(agent: Agent, member: Member, notice: messages.Notice) -> None:
    grace_ns = agent.injector.grace_ns(member.worker) or agent.grace_ns
    agent.recorder.write(NoticeRecord(of=member.worker, grace_s=grace_ns / 1e9))
    agent.injector.sees(member.worker, "notice", f"{grace_ns / 1e9:g} s")
    agent.preparation.noticed(member.worker, grace_ns)
    agent.decide(Notice(now_ns(), member.worker, grace_ns))
    for worker, stages in held_back(agent.node.state).items():
        grace_s = (agent.injector.grace_ns(worker) or agent.grace_ns) / 1e9
        text = f"is to leave within {grace_s:g} s, but nobody can take over {stages_in_words(stages)}"
        if agent.account.note(f"worker {worker} {text}"):
            agent.recorder.write(StaysRecord(of=worker, text=text))


@_handles(messages.Strike)
def _on_strike(agent: Agent, member: Member, strike: messages.Strike) -> None:
    agent.injector.strike(strike.fault)


@_handles(messages.Suffered)
def _on_suffered(agent: Agent, member: Member, suffered: messages.Suffered) -> None:
    agent.injector.sees(member.worker, "suffered", suffered.how, suffered.fault)


@_handles(messages.Mark)
def _on_mark(agent: Agent, member: Member, mark: messages.Mark) -> None:
    agent.injector.reached(mark.phase, mark.epoch)
