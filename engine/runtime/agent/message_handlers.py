"""What the agent makes of each kind of word of a worker: an event to decide on, an entry in the account, news for all.

Rule: nobody listens to a worker that is out.
"""

from __future__ import annotations

from collections.abc import Callable

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
from engine.runtime.agent.agent import Agent
from engine.runtime.agent.run_state import error_of
from engine.runtime.agent.worker_handles import Member
from engine.runtime.ipc.link import Message
from engine.runtime.ipc.recorder import now_ns


def hear(agent: Agent, member: Member, message: Message) -> None:
    """Takes in what a worker says, unless it is out: it may not know yet, and what it says counts for nothing."""
    if member.worker in agent.node.state.out:
        return
    with agent.failing():
        _HANDLERS[message["kind"]](agent, member, message)


def _on_partition(agent: Agent, member: Member, message: Message) -> None:
    agent.account.cut(message)
    agent.recorder.write(PartitionRecord(starts=message["starts"], layers=message["layers"]))
    agent.orders.broadcast("partition", starts=message["starts"])


def _on_border(agent: Agent, member: Member, message: Message) -> None:
    agent.orders.broadcast("border", stage=message["stage"], specs=message["specs"])


def _on_pure(agent: Agent, member: Member, message: Message) -> None:
    agent.account.purity.add(member.worker, message["rows"])


def _on_ready(agent: Agent, member: Member, message: Message) -> None:
    member.state = "ready"
    agent.decide(Joined(now_ns(), member.worker, agent.node.name))


def _on_heartbeat(agent: Agent, member: Member, message: Message) -> None:
    at = (message["epoch"], message["step"], message["index"], message["inside"])
    agent.decide(Heartbeat(now_ns(), member.worker, *at))


def _on_vote(agent: Agent, member: Member, message: Message) -> None:
    ownership = agent.account.ownership
    commit = agent.account.vote(member.worker, message)
    if commit is not None and ownership is not None:
        agent.orders.decided = commit
        event = StepCommitted(now_ns(), message["epoch"], commit.step, ownership.shadows)
        agent.decide(*agent.preparation.at_commit(event, agent.node.state, ownership))


def _on_audit(agent: Agent, member: Member, message: Message) -> None:
    agent.account.audit(member.worker, message)
    rows = tuple(row[:3] for row in message["rows"])  # marks are for whoever disagrees
    agent.recorder.write(AuditRecord(of=member.worker, step=message["step"], pipeline=message["pipeline"], rows=rows))


def _on_validation(agent: Agent, member: Member, message: Message) -> None:
    agent.account.validated(message)
    agent.recorder.write(ValidationRecord(step=message["step"], loss=message["loss"], metric=message["metric"]))
    agent.orders.broadcast("validated", step=message["step"])


def _on_finished(agent: Agent, member: Member, message: Message) -> None:
    member.state = "finished"
    member.peak_stash = {(pipeline, stage): peak for pipeline, stage, peak in message["peak_stash"]}
    member.peak_memory_kib = message["peak_memory_kib"]
    peak_stash, peak_memory_kib = message["peak_stash"], member.peak_memory_kib
    agent.recorder.write(FinishedRecord(of=member.worker, peak_stash=peak_stash, peak_memory_kib=peak_memory_kib))
    agent.decide(Done(now_ns(), member.worker, message["epoch"]))


def _on_suspicion(agent: Agent, member: Member, message: Message) -> None:
    agent.recorder.write(SuspicionRecord(of=member.worker, text=message["text"]))
    agent.decide(Suspicion(now_ns(), member.worker, message["epoch"]))


def _on_failed(agent: Agent, member: Member, message: Message) -> None:
    going = agent.account.going_at_ns > 0 and not agent.is_stopping
    if going and agent.raised.is_survivable(member.worker, message, agent.node.state):
        agent.recorder.write(RaisedRecord(of=member.worker, step=message["step"], error=message["what"]))
        agent.injector.sees(member.worker, "raised", message["what"])
        return  # its end is the sign that counts
    member.state = "failed"
    agent.fail(error_of(member, message))


def _on_inventory(agent: Agent, member: Member, message: Message) -> None:
    agent.injector.reached("inventory", message["epoch"])
    agent.decide(Inventory(now_ns(), member.worker, message["epoch"], message["holds"], tuple(message["whole"])))


def _on_planned(agent: Agent, member: Member, message: Message) -> None:
    lost = tuple(message["lost_stages"])
    agent.decide(PlanAcknowledged(now_ns(), member.worker, message["epoch"], message["digest"], lost))


def _on_prepared(agent: Agent, member: Member, message: Message) -> None:
    agent.preparation.answered(member.worker, message["number"], message["digest"])


def _on_notice(agent: Agent, member: Member, message: Message) -> None:
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


def _on_fault(agent: Agent, member: Member, message: Message) -> None:
    agent.injector.hear(member.worker, message)


_HANDLERS: dict[str, Callable[[Agent, Member, Message], None]] = {
    "partition": _on_partition,
    "border": _on_border,
    "pure": _on_pure,
    "ready": _on_ready,
    "vote": _on_vote,
    "audit": _on_audit,
    "validation": _on_validation,
    "finished": _on_finished,
    "failed": _on_failed,
    "suspicion": _on_suspicion,
    "heartbeat": _on_heartbeat,
    "inventory": _on_inventory,
    "planned": _on_planned,
    "prepared": _on_prepared,
    "notice": _on_notice,
    "strike": _on_fault,
    "suffered": _on_fault,
    "mark": _on_fault,
}
