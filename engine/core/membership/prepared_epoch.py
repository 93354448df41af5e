"""What the coming commit will bring, if nothing unexpected comes before it: an epoch can be prepared before it begins.

Rules: the table of the membership protocol is pure, so it is asked what it would decide. What the members will say
that they hold follows from the commit itself: every replica has voted for it, so each is whole at the boundary, and
nothing is held of a step that nobody has begun.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.core.membership.effects import PublishPlanInput
from engine.core.membership.events import Event, Inventory, StepCommitted
from engine.core.membership.protocol import step
from engine.core.membership.state import Phase, State
from engine.core.ownership import Ownership
from engine.core.recovery.inventory import Inventory as Held
from engine.core.recovery.inventory import to_json


@dataclass(frozen=True, slots=True)
class Foreseen:
    """An epoch that begins with a commit: the commit and what everybody says after it, and what the plan is made of."""

    events: tuple[Event, ...]
    document: PublishPlanInput


def foresee(state: State, ownership: Ownership, now_ns: int) -> Foreseen | None:
    """Returns the epoch that begins with the commit of the open step, which has this ownership; None if none does."""
    if state.phase is not Phase.RUNNING or not state.leaving:
        return None
    commit = StepCommitted(now_ns, state.epoch, state.committed + 1, ownership.shadows)
    new, effects = step(state, commit)
    if new.phase is not Phase.RECONFIGURING:
        return None
    held = (held_at_boundary(worker, new.committed + 1, ownership) for worker in new.members)
    answers = tuple(
        Inventory(now_ns, each.worker, new.epoch, to_json(each), ownership.grid.places(each.whole)) for each in held
    )
    for answer in answers:
        new, effects = step(new, answer)
    (document,) = effects
    assert isinstance(document, PublishPlanInput)
    return Foreseen((commit, *answers), document)


def held_at_boundary(worker: int, step: int, ownership: Ownership) -> Held:
    """Returns what a worker holds before `step` begins, after a step with this ownership."""
    slots = tuple(sorted({*ownership.slots_of(worker), *ownership.shadowed_by(worker)}))
    nothing = dict.fromkeys(slots, 0)
    return Held(worker, step, slots, nothing, nothing, (), ())
