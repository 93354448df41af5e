"""The prepared epoch: the epoch that the coming commit will begin, computed in advance.

    StepCommitted -> Inventory of each member -> PublishPlanInput      (applied to a copy of the state)

Rules: the protocol is pure, so its table can be applied to events that have not happened yet. The inventories follow
from the commit: every replica has voted for it and is therefore whole at the boundary, and no worker has begun the next
step. If another event comes first, the prepared epoch is not used.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.errors import InvariantError
from engine.core.membership.effects import PublishPlanInput
from engine.core.membership.events import Event, InventoryReceived, StepCommitted
from engine.core.membership.protocol import step
from engine.core.membership.state import Phase, State
from engine.core.messages import PlanMessage
from engine.core.ownership import Ownership
from engine.core.recovery.inventory import Inventory as Held
from engine.core.recovery.inventory import to_json


@dataclass(frozen=True, slots=True)
class PreparedEpoch:
    """A prepared epoch: the events that lead to it (the commit, the inventories), and the input of its plan."""

    events: tuple[Event, ...]
    document: PlanMessage


def prepare_epoch(state: State, ownership: Ownership, now_ns: int) -> PreparedEpoch | None:
    """Returns the epoch that the commit of the open step, with this ownership, begins; None if it begins none."""
    if state.phase is not Phase.RUNNING or not state.leaving:
        return None
    commit = StepCommitted(now_ns, state.epoch, state.committed + 1, ownership.shadows)
    new, effects = step(state, commit)
    if new.phase is not Phase.RECONFIGURING:
        return None
    held = (held_at_boundary(worker, new.committed + 1, ownership) for worker in new.members)
    answers = tuple(
        InventoryReceived(now_ns, each.worker, new.epoch, to_json(each), ownership.grid.places(each.whole))
        for each in held
    )
    for answer in answers:
        new, effects = step(new, answer)
    (effect,) = effects
    if not isinstance(effect, PublishPlanInput):
        raise InvariantError(f"the last inventory of a prepared epoch led to {effect}")
    return PreparedEpoch((commit, *answers), effect.document)


def held_at_boundary(worker: int, step: int, ownership: Ownership) -> Held:
    """Returns the inventory of a worker at the boundary before `step`, after a step with this ownership."""
    slots = tuple(sorted(ownership.held_by(worker)))
    nothing = dict.fromkeys(slots, 0)
    return Held(worker, step, slots, nothing, nothing, (), ())
