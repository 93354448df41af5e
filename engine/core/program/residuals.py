"""Residuals that travel: which ones a worker that leaves sends to its successors, and which are recomputed.

    leaver      1F0 1F1 1F2 1B0 | fence | 1HAND0 1SHIP1 1SHIP2
    successor                   | fence | 1HAND0 1SHIP1 1SHIP2 1B1 1F3 1B2     no forward is run again

Rules: a residual goes to the owner of its slot, which then counts its forward. Those of a slot go in the order of the
microbatches, behind the accumulator, because the forwards count in that order: the first one that is recomputed ends
them. With `ship` all are sent that fit into the time that the worker has left. With `auto` those of them with which the
rest of the step is over first: all, none, or each that takes less time than to recompute it, if all that a successor
gets is worth the time to load what makes graphs there. The plans with these are run dry (`quickest`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from engine.core.action import Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.inventory import Inventory
from engine.core.value import Kind

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
        """The slot."""
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
    """Returns the residuals to send in `step`, by slot; `left_ns` is the time that is left to each worker that leaves.

    None with `recompute`, and none of a worker whose time is unknown.
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
