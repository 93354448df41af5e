"""The pending effects (orders) of a state: a pure function of the state.

Rules: transitions only change the state. An order that is new is sent at once; all orders are repeated if the job makes
no progress. An order that was lost, sent twice, or decided by a coordinator that has ended therefore needs no rule.
"""

from __future__ import annotations

from engine.core.membership import effects
from engine.core.membership.broken_edges import ends_of
from engine.core.membership.state import GATHERING, Phase, State
from engine.core.membership.verdicts import leavers
from engine.core.messages import PlanMessage


def pending_effects(state: State) -> tuple[effects.Effect, ...]:
    """Returns all effects that are due in this state, in the order of sending."""
    epoch = state.epoch
    if state.phase is Phase.HALTED:
        return (effects.Halt(epoch, state.committed, state.exit_code, state.lost_stages, state.reason),)
    if state.phase is Phase.FINISHED:
        is_whole = state.members and len(state.done) == len(state.members)
        return (effects.Finish(epoch, state.committed, "" if is_whole else state.reason),)
    if state.phase is Phase.RESTARTING:
        return (effects.OrderRestart(epoch, state.restarts, state.reason),)
    found: list[effects.Effect] = []
    if state.phase is Phase.RECONFIGURING:
        found.append(effects.AnnounceCommit(epoch - 1, state.committed, "epoch"))  # ends the previous epoch
    if epoch and state.phase is not Phase.FORMING:  # after a restart
        found.append(effects.PublishEpoch(epoch, state.members, state.verdict, state.reason, state.planned))
    found += (
        effects.Evict(epoch, worker, each.why) for worker, each in state.out.items() if worker not in state.exited
    )
    if state.look:
        found.append(effects.Look(epoch, ends_of(state.look)))
    if state.phase in GATHERING:
        found.append(_gathering(state))
    elif state.phase is not Phase.FORMING:
        found += _training(state)
    return tuple(found)


def _gathering(state: State) -> effects.Effect:
    if len(state.inventories) < len(state.members):
        return effects.GatherInventories(state.epoch)
    return effects.PublishPlanInput(state.epoch, plan_document(state), state.verdict)


def plan_document(state: State) -> PlanMessage:
    """Returns the input of the plan of this epoch, once all inventories have come."""
    return PlanMessage(
        state.epoch,
        state.committed,
        state.members,
        state.leaving_at_start,
        state.owners,
        state.shadows,
        inventories=tuple(sorted(state.inventories.items())),
    )


def _training(state: State) -> list[effects.Effect]:
    found: list[effects.Effect] = [effects.StartTraining(state.epoch)]
    if state.committed >= 0:
        found.append(
            effects.AnnounceCommit(state.epoch, state.committed, "end" if state.phase is Phase.DRAINING else "step")
        )
    if state.phase is Phase.RUNNING and (moving := leavers(state)):
        found.append(effects.OrderHandOver(state.epoch, state.committed + 1, moving))
    return found
