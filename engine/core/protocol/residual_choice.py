"""The choice of residuals that travel, as a part of the document of a plan, and its record.

The workers that leave have told what they can send; the rate of the links follows from the replicas that were sent. The
host of the coordinator chooses, because it knows the time that a worker has left, and all members get the choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from engine.core.errors import InvariantError
from engine.core.history.run_records import ResidualsRecord
from engine.core.job.job import Job
from engine.core.ownership import Ownership
from engine.core.program.inventory import PlanMessage, from_json
from engine.core.program.planner import PlanInput, refuse_impossible
from engine.core.program.residuals import ships_in
from engine.core.protocol.inputs_outputs import CoordinatorOutput, Note, Write
from engine.core.protocol.rebalancing import departure_ns
from engine.core.texts import counted, size_text

_PLAN_NS = 100_000_000  # to make the plan


def left_ns(
    workers: Iterable[int], deadlines_ns: Mapping[int, int], graces_ns: Mapping[int, int], now_ns: int
) -> dict[int, int]:
    """Returns the nanoseconds that workers that leave have to send residuals; 0 if they are over."""
    spare_ns = {worker: departure_ns(graces_ns.get(worker, 0)) + now_ns + _PLAN_NS for worker in workers}
    return {worker: max(0, deadlines_ns.get(worker, 0) - ns) * 4 // 5 for worker, ns in spare_ns.items()}


def with_ships(
    document: PlanMessage, job: Job, bytes_per_s: float, left: Mapping[int, int]
) -> tuple[PlanMessage, list[CoordinatorOutput]]:
    """Returns the document with the residuals that workers are to send, and the records and lines about them.

    Those that leave have so many ns left. A document that cannot be stays as it is: the workers refuse it.
    """
    if job.residuals == "recompute":
        return document, []
    ownership, committed = Ownership(job.grid, document.owners, document.shadows), document.committed
    try:
        inventories = tuple(from_json(text) for _, text in document.inventories)
        refuse_impossible(PlanInput(document.epoch, committed, ownership, inventories))
    except InvariantError:
        return document, []
    offers = [held for held in inventories if held.worker in document.leaving and (held.saved or held.stuck)]
    ships = ships_in(ownership, committed + 1, inventories, job.residuals, bytes_per_s, left) if offers else ()
    outputs: list[CoordinatorOutput] = []
    for held in offers:
        mine = [ship for ship in ships if ship.giver == held.worker]
        num_bytes = sum(held.saved[ship.slot].bytes_of(ship.microbatch) for ship in mine)
        sent = tuple(str(ship.action) for ship in mine)
        record = ResidualsRecord(epoch=document.epoch, of=held.worker, sent=sent, bytes=num_bytes, stuck=held.stuck)
        text = f"sends {counted(len(mine), 'residual')} to its successors, {size_text(num_bytes)}"
        why = f"; other forwards are run again: {held.stuck}" if held.stuck else ""
        outputs += [Write(record), Note(f"worker {held.worker} {text if mine else 'sends no residual'}{why}")]
    return replace(document, ships=tuple((ship.giver, *ship.slot, ship.microbatch) for ship in ships)), outputs
