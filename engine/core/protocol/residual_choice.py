"""The choice of residuals that travel, as a part of the document of a plan, and its record.

The workers that leave have told what they can send; the rate of the links follows from the replicas that were sent. The
host of the coordinator chooses, because it knows the time that a worker has left, and all members get the choice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from engine.core.history.run_records import ResidualsRecord
from engine.core.ownership import Ownership
from engine.core.program.inventory import Inventory, PlanMessage, from_json
from engine.core.program.residuals import Ship, ships_in
from engine.core.protocol.coordinator_state import CoordinatorState
from engine.core.protocol.inputs_outputs import CoordinatorOutput, Note, Write
from engine.core.protocol.rebalancing import departure_ns
from engine.core.protocol.worker_times import bytes_per_s
from engine.core.texts import counted, size_text

_PLAN_NS = 100_000_000  # to make the plan


def left_ns(state: CoordinatorState, worker: int) -> int:
    """Returns the time that a worker that leaves has to send residuals; 0 if it is over or not known."""
    departs_ns = state.preparation.deadlines_ns.get(worker, 0) - departure_ns(state.graces_ns.get(worker, 0))
    return max(0, departs_ns - state.membership.moved_ns - _PLAN_NS) * 4 // 5  # accumulators go first


def with_ships(state: CoordinatorState, document: PlanMessage) -> PlanMessage:
    """Returns the document with the residuals that leaving workers are to send."""
    if not any(held.saved for held in _offers(document)):
        return document
    left = {worker: left_ns(state, worker) for worker in document.leaving}
    inventories = [from_json(text) for _, text in document.inventories]
    ownership = Ownership(state.job.grid, document.owners, document.shadows)
    rate = bytes_per_s(state.costs, state.sizes)
    ships = ships_in(ownership, document.committed + 1, inventories, state.job.residuals, rate, left)
    return replace(document, ships=tuple((each.giver, *each.slot, each.microbatch) for each in ships))


def _offers(document: PlanMessage) -> Iterator[Inventory]:
    """Yields the inventories of leaving workers that say something about residuals."""
    for worker, text in document.inventories:
        if worker in document.leaving and ((held := from_json(text)).saved or held.stuck):
            yield held


def told_of_residuals(document: PlanMessage) -> list[CoordinatorOutput]:
    """Returns the records and the lines about residuals that are sent, and about those that cannot be."""
    ships, outputs = [Ship(*each) for each in document.ships], list[CoordinatorOutput]()
    for held in _offers(document):
        mine = [ship for ship in ships if ship.giver == held.worker]
        num_bytes = sum(held.saved[ship.slot].bytes_of(ship.microbatch) for ship in mine)
        sent = tuple(str(ship.action) for ship in mine)
        outputs.append(
            Write(ResidualsRecord(epoch=document.epoch, of=held.worker, sent=sent, bytes=num_bytes, stuck=held.stuck))
        )
        text = f"sends {counted(len(mine), 'residual')} to its successors, {size_text(num_bytes)}"
        why = f"; other forwards are run again: {held.stuck}" if held.stuck else ""
        outputs.append(Note(f"worker {held.worker} {text if mine else 'sends no residual'}{why}"))
    return outputs
