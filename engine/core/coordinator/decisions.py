"""Decisions: the membership protocol decides on events as one, and its effects become outputs."""

from __future__ import annotations

from engine.core.coordinator.orders import Decided, carry_out, tell_all
from engine.core.coordinator.preparation import looked
from engine.core.coordinator.state import CoordinatorState
from engine.core.membership.effects import Effect
from engine.core.membership.events import Event
from engine.core.membership.protocol import step


def decide(state: CoordinatorState, *events: Event) -> Decided:
    """Returns the state and the outputs after events that are decided as one; a run that is ending ignores them.

    Then lets the workers prepare the epoch of the coming commit.
    """
    if state.is_stopping:
        return state, ()
    membership, effects = state.membership, list[Effect]()
    for event in events:
        membership, found = step(membership, event)
        effects += found
    new, outputs = carry_out(state._replace(membership=membership), effects)
    if new.ballot is None or not membership.leaving or membership.decided() == state.membership.decided():
        return new, outputs
    preparation, order = looked(new.preparation, membership, new.ballot.ownership, events[-1].now_ns)
    if order is None:
        return new, outputs
    new = new._replace(preparation=preparation)
    return new, (*outputs, tell_all(new, order))
