"""The orders about plans: a repair, of which each member is told its part, or a document to make the plan from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from statistics import fmean

from engine.core.action import Op
from engine.core.errors import InvariantError
from engine.core.history.run_records import ResidualsRecord
from engine.core.job.job import Job
from engine.core.message_kinds import MAX_BYTES
from engine.core.ownership import Ownership
from engine.core.program.build import baseline
from engine.core.program.dry_run import makespan_of
from engine.core.program.handoff import Ship, ship_ns, ships_in
from engine.core.program.inventory import (
    PlanMessage,
    PlanPartMessage,
    PrepareMessage,
    PreparePartMessage,
    ProgramRest,
    Repair,
    from_json,
)
from engine.core.program.plan_parts import parts_of
from engine.core.program.planner import (
    PlanInput,
    adopted_and_lost,
    healing_in,
    held_at_start,
    make_plan,
    refuse_impossible,
    repair_of,
)
from engine.core.program.schedules import COSTS
from engine.core.protocol.inputs_outputs import CoordinatorOutput, Note, Tell, Write
from engine.core.protocol.rebalancing import departure_ns
from engine.core.texts import counted, size_text

_MOST_OF_PLAN = 4 * MAX_BYTES  # programs and inventories take less than a quarter when they are compressed


def with_repair(job: Job, document: PlanMessage) -> PlanMessage:
    """Returns the document with its plan, if that is a repair and fits a message; workers refuse an impossible one."""
    if not document.before or (base := baseline(document.schedule or job.schedule, job.grid, document.before)) is None:
        return document
    return _with_repair(job, document, partial(repair_of, base=base))


def at_boundary(job: Job, document: PlanMessage) -> PlanMessage:
    """Returns the document of an epoch that a commit begins, with its plan, if that fits and there are no shards."""
    return document if job.grid.fsdp else _with_repair(job, document, repair_at_boundary)


def repair_at_boundary(source: PlanInput) -> Repair | None:
    """Returns the repair of a step that no member has begun, None if a stage is lost; raises InvariantError."""
    adopted, lost = adopted_and_lost(source)
    owners, members = frozenset(source.ownership.owners), (inventory.worker for inventory in source.inventories)
    rests = tuple(ProgramRest(worker, 0 if worker in owners else -1) for worker in members)
    return None if lost else Repair(rests, adopted, (), (), tuple(sorted(healing_in(source))))


def _with_repair(job: Job, document: PlanMessage, repair: Callable[[PlanInput], Repair | None]) -> PlanMessage:
    ownership = Ownership(job.grid, document.owners, document.shadows)
    try:
        inventories = tuple(from_json(text) for _, text in document.inventories)
        planned = replace(
            document, repair=repair(PlanInput(document.epoch, document.committed, ownership, inventories))
        )
    except InvariantError:
        return document
    size = len(repr(planned)) + sum(text.count('"') for _, text in document.inventories)  # no less than it has as JSON
    return planned if size <= _MOST_OF_PLAN else document


def in_parts(job: Job, base: PlanMessage | None, plan: PlanMessage, workers: tuple[int, ...]) -> tuple[Tell, ...]:
    """Returns the orders to send a plan: to each worker its part, or the whole without a base, or without tags."""
    parts = {} if base is None or job.backend == "nccl" else dict(parts_of(plan, base, job.grid))
    workers = tuple(worker for worker in workers if worker in plan.members)
    rest = tuple(worker for worker in workers if worker not in parts)
    whole = (Tell(rest, plan),) if rest else ()
    return (*(Tell((worker,), parts[worker]) for worker in workers if worker in parts), *whole)


def to_prepare(job: Job, base: PlanMessage | None, order: PrepareMessage, workers: tuple[int, ...]) -> tuple[Tell, ...]:
    """Returns the orders to prepare a plan, as `in_parts`; each part has the inventory from which its member begins."""
    plan = at_boundary(job, order.plan)
    holds, orders = dict(plan.inventories), list[Tell]()
    for told, message in in_parts(job, base, plan, workers):
        if isinstance(message, PlanPartMessage):
            orders.append(Tell(told, PreparePartMessage(order.number, message, holds[told[0]])))
        else:
            orders.append(Tell(told, replace(order, plan=plan)))
    return tuple(orders)


# The choice of residuals that travel, as a part of the document of a plan, and its record.
#
# The workers that leave have told what they can send, and how fast their links to other hosts are. The rate of other
# links follows from the replicas that were sent. The host of the coordinator chooses, because it knows the time that a
# worker has left, and all members get the choice.


_PLAN_NS = 100_000_000  # to make the plan
_MOST_COMPARED = 256  # microbatches of slots: to compare their plans takes a tenth of a second


def left_ns(
    workers: Iterable[int], deadlines_ns: Mapping[int, int], graces_ns: Mapping[int, int], now_ns: int
) -> dict[int, int]:
    """Returns the nanoseconds that workers that leave have to send residuals; 0 if they are over."""
    spare_ns = {worker: departure_ns(graces_ns.get(worker, 0)) + now_ns + _PLAN_NS for worker in workers}
    return {worker: max(0, deadlines_ns.get(worker, 0) - ns) * 4 // 5 for worker, ns in spare_ns.items()}


def chosen_ships(source: PlanInput, mode: str, bytes_per_s: float, left: Mapping[int, int]) -> tuple[Ship, ...]:
    """Returns the residuals to send; with `auto`, in a job of some size, those of the plan that ends first."""
    given = source.ownership, source.committed + 1, source.inventories
    one, grid = ships_in(*given, mode, bytes_per_s, left), source.ownership.grid
    if mode != "auto" or grid.stages * grid.pipelines * grid.microbatches > _MOST_COMPARED:
        return one
    ways = dict.fromkeys(((), one, ships_in(*given, "ship", bytes_per_s, left)))
    if len(ways) == 1:
        return one
    return min(ways, key=lambda ships: (_rest_ns(replace(source, ships=ships), bytes_per_s), len(ships)))


def _rest_ns(source: PlanInput, bytes_per_s: float) -> float:
    """Returns the time of the rest of the step, as if all forwards took as long as those of the workers that leave.

    A residual comes over the link; the first backward with one at a worker loads what makes graphs, and each makes one.
    """
    plan, owner = make_plan(source), source.ownership.owner
    held = {each.worker: each for each in source.inventories}
    forward_ns = fmean(saved.forward_ns for each in held.values() for saved in each.saved.values())
    came = {ship[1:]: held[ship.giver] for ship in source.ships}
    costs: dict[int, list[float]] = {}
    for worker, actions in plan.program.items():
        costs[worker], has_loaded = [], False
        for stage, op, microbatch, pipeline in actions:
            cost, slot = COSTS.get(op, 0.0) * forward_ns, (pipeline, stage)
            giver = came.get((*slot, microbatch))
            if giver is not None and op is Op.SHIP:
                rate = giver.rates.get(owner(*slot), bytes_per_s)
                cost = ship_ns(giver.saved[slot].bytes_of(microbatch), rate) if worker == giver.worker else 0.0
            elif giver is not None and op in (Op.B, Op.I):
                cost += giver.saved[slot].graph_ns + (0 if has_loaded else giver.saved[slot].load_ns)
                has_loaded = True
            costs[worker].append(cost)
    return makespan_of(plan.program, source.ownership, costs, held_at_start(source))


def with_ships(
    document: PlanMessage, job: Job, bytes_per_s: float, left: Mapping[int, int]
) -> tuple[PlanMessage, list[CoordinatorOutput]]:
    """Returns the document with the residuals to send in the `left` ns, and the records and lines about them."""
    if job.residuals == "recompute":
        return document, []
    ownership, committed = Ownership(job.grid, document.owners, document.shadows), document.committed
    try:
        inventories = tuple(from_json(text) for _, text in document.inventories)
        refuse_impossible(PlanInput(document.epoch, committed, ownership, inventories))
    except InvariantError:
        return document, []
    offers = [held for held in inventories if held.worker in document.leaving and (held.saved or held.stuck)]
    source = PlanInput(document.epoch, committed, ownership, inventories)
    ships = chosen_ships(source, job.residuals, bytes_per_s, left) if offers else ()
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
