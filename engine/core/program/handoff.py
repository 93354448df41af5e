"""Handoff: what a plan lets a worker that leaves send to the owners of slots, so that nothing is run again.

    leaver   1F0 1F1 1F2 1B0 | fence | 1HAND0 1SHIP1 1SHIP2 1SEND_B0 ...   what it has added, then what others lack
    owner                    | fence | 1HAND0 1SHIP1 1SHIP2 1B1 1F3 1B2    no forward is run again

Accumulators: the owner of a slot takes that of the member that has added the most, if that is more than its own: a
leaver, or a shadow that has taken a later stream. It comes with the losses and with the buffers before each of its
forwards, so the owner continues as if it had run them. A forward that was counted but not added is rerun, unless its
residual is sent. What a member without slots sends is received first: it is about to leave.

Residuals: one goes to the owner of its slot, which then counts its forward. Those of a slot go in the order of the
microbatches, behind the accumulator, because forwards count in that order: the first one that is recomputed ends them.
With `ship` all are sent that fit into the time left. With `auto` those with which the rest of the step is over first:
all, none, or each that is quicker to send than to recompute, if a successor gains the time to load what makes graphs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import carried
from engine.core.program.inventory import Inventory
from engine.core.value import Held, Kind, Value

LATENCY_NS = 200_000  # of the messages of a residual
_NS = 1e9


class Ship(NamedTuple):
    """The residual of a microbatch that goes from a worker that leaves to the owner of its slot."""

    giver: int
    pipeline: int
    stage: int
    microbatch: int

    @property
    def slot(self) -> Slot:
        """Pipeline and stage."""
        return self.pipeline, self.stage

    @property
    def action(self) -> Action:
        """The action, at both ends."""
        return Action(self.stage, Op.SHIP, self.microbatch, self.pipeline)


def ship_ns(num_bytes: int, bytes_per_s: float) -> float:
    """Returns the time that a residual is on its way."""
    return LATENCY_NS + num_bytes / bytes_per_s * _NS


def ships_in(
    ownership: Ownership,
    step: int,
    inventories: Sequence[Inventory],
    mode: str,
    bytes_per_s: float,  # of links whose rate the giver does not know
    left_ns: Mapping[int, int],
) -> tuple[Ship, ...]:
    """Returns the residuals to send in `step`, by slot; `left_ns` is the time left to each worker that leaves.

    There are none with `recompute`, and none of a worker whose time is unknown.
    """
    if mode == "recompute":
        return ()
    held = {inventory.worker: inventory for inventory in inventories if inventory.step == step}
    left, ships, gains_ns = dict(left_ns), list[Ship](), Counter[int]()
    for giver, slot in sorted((worker, slot) for worker, each in held.items() for slot in each.saved):
        taker = held.get(ownership.owner(*slot))
        if taker is None or taker.worker == giver or slot in taker.logged:
            continue
        saved, rate = held[giver].saved[slot], held[giver].rates.get(taker.worker, bytes_per_s)
        for microbatch in _lacking(slot, taker, held[giver], held.values()):
            took_ns = ship_ns(saved.bytes_of(microbatch), rate)
            if (mode == "auto" and took_ns + saved.graph_ns >= saved.forward_ns) or took_ns > left.get(giver, 0):
                break
            left[giver] -= round(took_ns)
            ships.append(Ship(giver, *slot, microbatch))
            gains_ns[taker.worker] += saved.forward_ns - saved.graph_ns - round(took_ns)
    if mode == "auto":
        loads_ns = {ship.giver: max(saved.load_ns for saved in held[ship.giver].saved.values()) for ship in ships}
        ships = [ship for ship in ships if gains_ns[ownership.owner(*ship.slot)] > loads_ns[ship.giver]]
    return tuple(sorted(ships, key=lambda ship: ship[1:]))


def _lacking(slot: Slot, taker: Inventory, giver: Inventory, held: Collection[Inventory]) -> Iterator[int]:
    """Yields the microbatches, in order, whose residuals the taker can take as the next ones, with what is handed."""
    saved = giver.saved[slot]
    added = max(each.added.get(slot, 0) for each in held if slot in each.whole)
    counted = max(added, taker.counted.get(slot, 0))
    for microbatch in range(max(saved.first, added), saved.first + len(saved.sizes)):
        if microbatch > counted:
            return
        if not taker.values.has(Kind.RESIDUAL, slot, microbatch):
            yield microbatch
        counted = max(counted, microbatch + 1)


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
