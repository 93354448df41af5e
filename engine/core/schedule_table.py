"""The comparison of schedules: what the dry run of each says for the same workers, stages, microbatches and costs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.core.action import COMPUTE_OPS, SEND_OPS
from engine.core.dry_run import Cost, dry_run, unit_costs
from engine.core.ownership import Grid, fresh
from engine.core.program import build_program
from engine.core.schedules.registry import SCHEDULES


@dataclass(frozen=True, slots=True)
class Row:
    """One schedule: its length over the work of the busiest worker, the share of idle time, memory, transfers.

    `peak_stash` counts residuals of stages, each 1 / V of a worker's share of the model.
    """

    schedule: str
    stages_per_worker: int
    placement: str
    makespan: float
    over_ideal: float
    bubble: float
    peak_stash: int
    transfers: int


def compare(stages: int, microbatches: int, stages_per_worker: int, cost: Cost = unit_costs) -> Iterator[Row]:
    """Yields a row for every schedule that fits, on as many workers, with V stages each or one that is V of them.

    `cost` is that of an action of one of `stages` stages; a schedule of one stage per worker runs V of them as one.
    """
    num_workers = stages // stages_per_worker
    for name, schedule in SCHEDULES.items():
        v = stages_per_worker if schedule.takes(stages_per_worker) else 1
        if not schedule.takes(v) or microbatches < schedule.least_microbatches(num_workers):
            continue
        scale = stages_per_worker // v
        ownership = fresh(Grid(num_workers * v, microbatches), v, schedule.placement)
        program = build_program(name, ownership)
        run = dry_run(program, ownership, lambda action, scale=scale: scale * cost(action))  # type: ignore[misc]
        work = [
            sum(scale * cost(action) for action in actions if action.op in COMPUTE_OPS) for actions in program.values()
        ]
        transfers = sum(action.op in SEND_OPS for actions in program.values() for action in actions)
        over = run.makespan / max(work)
        peak = max(run.peak_stash.values())
        yield Row(name, v, schedule.placement, run.makespan, over, run.bubble, peak, transfers)
