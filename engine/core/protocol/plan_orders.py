"""The orders about plans: a repair, of which each member is told its part, or a document to make the plan from."""

from __future__ import annotations

from dataclasses import replace

from engine.core.errors import InvariantError
from engine.core.job.job import Job
from engine.core.message_kinds import MAX_BYTES
from engine.core.ownership import Ownership
from engine.core.program.build import baseline
from engine.core.program.inventory import PlanMessage, from_json
from engine.core.program.plan_parts import parts_of
from engine.core.program.planner import PlanInput, repair_of
from engine.core.protocol.inputs_outputs import Tell

_MOST_OF_PLAN = 4 * MAX_BYTES  # programs and inventories take less than a quarter when they are compressed


def with_repair(job: Job, document: PlanMessage) -> PlanMessage:
    """Returns the document with its plan, if that is a repair and fits a message.

    A document that cannot be is refused by the workers.
    """
    if not document.before or (base := baseline(document.schedule or job.schedule, job.grid, document.before)) is None:
        return document
    ownership = Ownership(job.grid, document.owners, document.shadows)
    try:
        inventories = tuple(from_json(text) for _, text in document.inventories)
        repair = repair_of(PlanInput(document.epoch, document.committed, ownership, inventories), base)
    except InvariantError:
        return document
    planned = replace(document, repair=repair)
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
