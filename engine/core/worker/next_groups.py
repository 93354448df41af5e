"""The rules of the worker machine for the group of a coming epoch, which is formed while training goes on.

    NextGroupMessage -> forms it in a thread -> NextGroupFormedMessage
    EpochMessage that names it -> leaves the present group and enters it, at a step boundary
    any other epoch, or another attempt -> gives it up

Rule: a group belongs to one epoch and one attempt, and is entered with the epoch that names both, or never.
"""

from __future__ import annotations

from engine.core.errors import ensure
from engine.core.messages import EpochMessage
from engine.core.process_messages import NextGroupFormedMessage, NextGroupMessage
from engine.core.worker.inputs import GroupKey, NextGroupFormed
from engine.core.worker.outputs import EnterNextGroup, FormNextGroup, LeaveNextGroups, Output, Say
from engine.core.worker.state import WorkerState
from engine.core.worker.step_rules import Stepped


def forms(state: WorkerState, told: NextGroupMessage) -> Stepped:
    """Begins to form a group, and gives up the attempts before it for the same epoch; a late order changes nothing.

    The main thread may still have to enter the group of an epoch before.
    """
    key = GroupKey(told.epoch, told.number)
    if told.epoch <= state.epoch or any(each.epoch > key.epoch for each in state.next_groups):
        return state, ()
    gone = tuple(each for each in state.next_groups if each.epoch == key.epoch)
    if key in gone and state.worker in told.members:
        return state, ()  # said twice
    kept = {each: is_formed for each, is_formed in state.next_groups.items() if each not in gone}
    outputs: tuple[Output, ...] = (LeaveNextGroups(gone),) if gone else ()
    if state.worker not in told.members:
        return state._replace(next_groups=kept), outputs
    return state._replace(next_groups={**kept, key: False}), (*outputs, FormNextGroup(told))


def is_next_formed(state: WorkerState, formed: NextGroupFormed) -> Stepped:
    """Tells the coordinator of the group or of the failure; an attempt that was given up changes nothing."""
    key = formed.key
    if key not in state.next_groups:
        return state, ()
    said = Say(NextGroupFormedMessage(key.epoch, key.number, formed.failure))
    if not formed.failure:
        return state._replace(next_groups={**state.next_groups, key: True}), (said,)
    kept = {each: is_formed for each, is_formed in state.next_groups.items() if each != key}
    return state._replace(next_groups=kept), (LeaveNextGroups((key,)), said)


def changes_group(state: WorkerState, epoch: EpochMessage) -> Stepped:
    """Enters the group that an epoch names; gives up all others that are not of a later epoch."""
    key = GroupKey(epoch.epoch, epoch.group)
    if epoch.group:
        here = f"worker {state.worker} has {dict(state.next_groups)}"
        ensure(state.next_groups.get(key, False), f"epoch {epoch.epoch} enters group {epoch.group}, and {here}")
    if not state.next_groups:
        return state, ()
    if epoch.group:
        state = state._replace(forming=0, failure=None)
    gone = tuple(each for each in state.next_groups if each.epoch <= epoch.epoch and each != key)
    outputs: tuple[Output, ...] = (LeaveNextGroups(gone),) if gone else ()
    if epoch.group:
        outputs = (*outputs, EnterNextGroup(key))
    later = {each: is_formed for each, is_formed in state.next_groups.items() if each.epoch > epoch.epoch}
    return state._replace(next_groups=later), outputs
