"""Handoff: the accumulators that a plan sends to the owners of slots, so that no backward is rerun.

    leaver   1F0 1F1 1B0 | fence | 1HAND0  1SEND_B0 ...      gives what it has added, then what others lack
    owner                | fence | 1HAND0  1F1 1B1 ...       goes on from there: only 1F1 is run again

Rules: the owner of a slot takes the accumulator of the member that has added the most, if that is more than its own:
a worker that leaves in the open step, or a shadow that has taken a later stream. An accumulator comes with the losses
and with the buffers before each of its forwards, so the owner can continue as if it had run them. A forward that was
counted but not added is rerun, unless its residual is sent (`residuals.py`). What a member without slots of its own
sends is received first: it is about to leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import carried
from engine.core.program.inventory import Inventory
from engine.core.program.residuals import Ship
from engine.core.value import Held, Kind, Value


class Hand(NamedTuple):
    """An accumulator that goes from one worker to another, with the number of its backwards."""

    giver: int
    taker: int
    slot: Slot
    added: int

    @property
    def action(self) -> Action:
        """The action, at both ends."""
        return Action(self.slot[1], Op.HAND, self.added - 1, self.slot[0])


def hands_in(
    ownership: Ownership, step: int, inventories: Iterable[Inventory], done: Collection[Slot]
) -> tuple[Hand, ...]:
    """Returns the accumulators to hand off in `step`, by slot; none for slots that are `done`."""
    most: dict[Slot, tuple[int, int]] = {}  # backwards added, and the worker, negated: the lowest of several
    owned: dict[Slot, int] = {}
    for held in inventories:
        for slot, added in held.added.items() if held.step == step else ():
            if slot in held.whole:
                most[slot] = max(most.get(slot, (0, 0)), (added, -held.worker))
                if ownership.owner(*slot) == held.worker:
                    owned[slot] = added
    return tuple(
        Hand(-giver, ownership.owner(*slot), slot, added)
        for slot, (added, giver) in sorted(most.items())
        if slot not in done and added > owned.get(slot, 0)
    )


def held_after(held: Sequence[Held], hands: Iterable[Hand]) -> tuple[Held, ...]:
    """Returns what workers hold after the handoffs; of a worker's counter the first entry counts."""
    counted = {(worker, value[1:3]): value.index for worker, value in held if value.kind is Kind.COUNTED}
    values: list[Held] = []
    for _, taker, slot, added in hands:
        values.append((taker, Value(Kind.ADDED, *slot, added - 1)))
        if counted.get((taker, slot), -1) < added - 1:
            values.append((taker, Value(Kind.COUNTED, *slot, added - 1)))
    return (*values, *held)


def held_with(ships: Sequence[Ship], held: Sequence[Held], ownership: Ownership) -> tuple[Held, ...]:
    """Returns what workers hold when the residuals have come, too."""
    counted: dict[tuple[int, Slot], int] = {}
    for worker, (kind, pipeline, stage, index) in held if ships else ():
        if kind is Kind.COUNTED:
            counted.setdefault((worker, (pipeline, stage)), index)
    values: list[Held] = []
    for ship in ships:
        taker = ownership.owner(*ship.slot)
        values.append((taker, Value(Kind.RESIDUAL, *ship.slot, ship.microbatch)))
        counted[taker, ship.slot] = max(counted.get((taker, ship.slot), -1), ship.microbatch)
    counters = ((worker, Value(Kind.COUNTED, *slot, last)) for (worker, slot), last in counted.items())
    return (*values, *counters, *held)


def with_hands(
    program: Mapping[int, tuple[Action, ...]], hands: Collection[Hand], ownership: Ownership, ships: Sequence[Ship] = ()
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with what is handed on in front, then the receipts from members without slots."""
    guests = [worker for worker in program if not ownership.slots_of(worker)]
    early = {carried(action) for worker in guests for action in program[worker] if action.op in SEND_OPS}
    lists = {}
    for worker, actions in program.items():
        mine = [each.action for each in hands if worker in (each.giver, each.taker)]
        mine += [each.action for each in ships if worker in (each.giver, ownership.owner(*each.slot))]
        first = [action for action in actions if action.op in RECEIVE_OPS and carried(action) in early]
        rest = [action for action in actions if action.op not in RECEIVE_OPS or carried(action) not in early]
        lists[worker] = (*mine, *first, *rest)
    return lists
