"""Effects of the membership protocol: its orders to workers and agents, a pure function of the state.

Rules: an effect has the number of its epoch, and states a result, which it finds in the state. Transitions only change
the state. An order that is new is sent at once; all orders are repeated if the job makes no progress. An order that was
lost, sent twice, or decided by a coordinator that has ended therefore needs no rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.core.membership.state import GATHERING, Phase, State
from engine.core.recovery.plan_messages import PlanMessage


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect, in the epoch that it belongs to."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PublishEpoch(Effect):
    """Tells every worker the members of the epoch; while they gather, each freezes and answers with its inventory."""


@dataclass(frozen=True, slots=True)
class PublishPlanInput(Effect):
    """Sends every member the document of the plan; each answers with the digest of its plan."""

    document: PlanMessage


@dataclass(frozen=True, slots=True)
class StartTraining(Effect):
    """Every member runs its plan; in the first epoch, its program."""


@dataclass(frozen=True, slots=True)
class AnnounceCommit(Effect):
    """`step` is committed; `then` the next step begins, the job ends, or all members wait for another epoch."""

    step: int
    then: Literal["step", "end", "epoch"]


@dataclass(frozen=True, slots=True)
class Evict(Effect):
    """The agent of `worker` kills it."""

    worker: int


@dataclass(frozen=True, slots=True)
class Fence(Effect):
    """Tells `worker`, whose messages are ignored, the current epoch."""

    worker: int


@dataclass(frozen=True, slots=True)
class OrderRestart(Effect):
    """No step is committed: all workers are ended, and then started again."""


@dataclass(frozen=True, slots=True)
class Halt(Effect):
    """The job ends before its last step is committed."""


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """Every step is committed and all workers may exit; `cut_short` is the reason if later work is incomplete."""

    cut_short: str = ""


def pending_effects(state: State) -> tuple[Effect, ...]:
    """Returns all effects that are due in this state, in the order of sending."""
    epoch, phase = state.epoch, state.phase
    if phase is Phase.HALTED:
        return (Halt(epoch),)
    if phase is Phase.FINISHED:
        is_whole = state.members and len(state.done) == len(state.members)
        return (Finish(epoch, "" if is_whole else state.reason),)
    if phase is Phase.RESTARTING:
        return (OrderRestart(epoch),)
    found: list[Effect] = []
    if phase is Phase.RECONFIGURING:
        found.append(AnnounceCommit(epoch - 1, state.committed, "epoch"))  # ends the previous epoch
    if epoch and phase is not Phase.FORMING:  # after a restart
        found.append(PublishEpoch(epoch))
    found += (Evict(epoch, worker) for worker in (*state.out, *state.lost) if worker not in state.exited)
    if phase in GATHERING:
        found += _gathering(state)
    elif phase is not Phase.FORMING:
        found.append(StartTraining(epoch))
        if state.committed >= 0:
            found.append(AnnounceCommit(epoch, state.committed, "end" if phase is Phase.DRAINING else "step"))
    return tuple(found)


def _gathering(state: State) -> list[Effect]:
    if len(state.inventories) < len(state.members):
        return []
    return [PublishPlanInput(state.epoch, plan_document(state))]


def _hosts(state: State) -> tuple[int, ...]:
    """Returns a number for the host of each member, by which the members place shadows; empty if all are on one."""
    nodes = [state.nodes.get(worker, "") for worker in state.members]
    numbers = {node: number for number, node in enumerate(dict.fromkeys(nodes))}
    return tuple(numbers[node] for node in nodes) if len(numbers) > 1 else ()


def plan_document(state: State) -> PlanMessage:
    """Returns the input of the plan of this epoch, once all inventories have come."""
    return PlanMessage(
        state.epoch,
        state.committed,
        state.members,
        state.leaving_at_start,
        state.owners,
        state.shadows,
        wanted=state.wanted_at_start,
        hosts=_hosts(state),
        inventories=tuple(sorted(state.inventories.items())),
    )
