"""The orders about plans: a repair, of which each member is told its part, or a document to make the plan from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from engine.core.errors import InvariantError
from engine.core.job.job import Job
from engine.core.message_kinds import MAX_BYTES
from engine.core.ownership import Ownership
from engine.core.program.build import baseline
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
from engine.core.program.planner import PlanInput, adopted_and_lost, healing_in, repair_of
from engine.core.protocol.inputs_outputs import Tell

_MOST_OF_PLAN = 4 * MAX_BYTES  # programs and inventories take less than a quarter when they are compressed


def with_repair(job: Job, document: PlanMessage) -> PlanMessage:
    """Returns the document with its plan, if that is a repair and fits a message.

    A document that cannot be is refused by the workers.
    """
    if not document.before or (base := baseline(document.schedule or job.schedule, job.grid, document.before)) is None:
        return document
    return _with_repair(job, document, partial(repair_of, base=base))


def at_boundary(job: Job, document: PlanMessage) -> PlanMessage:
    """Returns the document of an epoch that a commit begins, with its plan, if that fits a message.

    Its members run whole steps. With shards each of them makes the plan.
    """
    return document if job.grid.fsdp else _with_repair(job, document, repair_at_boundary)


def repair_at_boundary(source: PlanInput) -> Repair | None:
    """Returns the repair of a step that no member has begun: each runs its program of a whole step by these owners.

    None if a stage is lost. Raises InvariantError if the input is impossible.
    """
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
    """Returns the orders to tell `workers` a plan: each its part, or the whole to those that need it.

    Without tags, the transfers of all members have one order, so each needs the programs of all.
    """
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
