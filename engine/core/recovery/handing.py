"""Handing: the accumulators that a plan sends to the owners of slots, so that no backward is run again.

    leaver   1F0 1F1 1B0 | fence | 1HAND0  1SEND_B0 ...      gives what it has added, then what others lack
    owner                | fence | 1HAND0  1F1 1B1 ...       goes on from there: only 1F1 is run again

Rules: the owner of a slot takes the accumulator of the member that has added most of it, if that is more than its own.
This is a worker that leaves in the open step, or a shadow that has taken a later stream. An accumulator comes with the
losses and with the buffers before each of its forwards, so the owner can go on as if it had run them. A forward that
was counted and not added is run again. What a member without slots of its own sends is received first: it is about to
leave.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import carried
from engine.core.recovery.inventory import Inventory
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
    """Returns the accumulators to hand over in `step`, by slot; none for slots that are `done`."""
    held = {each.worker: each for each in inventories if each.step == step}
    hands = []
    for slot in ownership.grid.slots():
        added = {worker: each.added.get(slot, 0) for worker, each in held.items() if slot in each.whole}
        taker = ownership.owner(*slot)
        most = max(added.values(), default=0)
        if slot not in done and most > added.get(taker, 0):
            hands.append(Hand(min(worker for worker, each in added.items() if each == most), taker, slot, most))
    return tuple(hands)


def held_after(held: Sequence[Held], hands: Iterable[Hand]) -> tuple[Held, ...]:
    """Returns what workers hold when the accumulators have come; of a counter the first entry of a worker counts."""
    counted = {(worker, value[1:3]): value.index for worker, value in held if value.kind is Kind.COUNTED}
    found: list[Held] = []
    for _, taker, slot, added in hands:
        found.append((taker, Value(Kind.ADDED, *slot, added - 1)))
        if counted.get((taker, slot), -1) < added - 1:
            found.append((taker, Value(Kind.COUNTED, *slot, added - 1)))
    return (*found, *held)


def with_hands(
    program: Mapping[int, tuple[Action, ...]], hands: Collection[Hand], ownership: Ownership
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with the accumulators in front, and behind them the receipts from members without slots."""
    guests = [worker for worker in program if not ownership.slots_of(worker)]
    early = {carried(action) for worker in guests for action in program[worker] if action.op in SEND_OPS}
    found = {}
    for worker, actions in program.items():
        mine = [each.action for each in hands if worker in (each.giver, each.taker)]
        first = [action for action in actions if action.op in RECEIVE_OPS and carried(action) in early]
        rest = [action for action in actions if action.op not in RECEIVE_OPS or carried(action) not in early]
        found[worker] = (*mine, *first, *rest)
    return found
