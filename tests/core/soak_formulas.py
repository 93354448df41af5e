"""``python -m tests.core.soak_formulas``: the dry run of every schedule, and of runs of blocks, meets its formulas.

It takes the whole grid. The tests have a rule of their own do a part of it, in less time, and compare the dry run with
it on less.
"""

from __future__ import annotations

import sys
from itertools import product
from time import process_time

from engine.core.ownership import Grid, fresh
from engine.core.program.dry_run import dry_run
from engine.core.program.owners import on_owners
from engine.core.program.passes import with_transfers
from engine.core.program.schedules import SCHEDULES
from tests.core.test_remaining_tasks import disagreement_of_runs
from tests.core.test_schedule_formulas import LISTS, disagreement, shapes


def main() -> int:
    """Returns 0 if every formula is met, 1 at the first that is not; says what each schedule took."""
    for name in LISTS:
        begun, grid = process_time(), list(shapes(SCHEDULES[name]))
        for p, v, m in grid:
            ownership = fresh(Grid(p * v, m), v, SCHEDULES[name].placement)
            lists = SCHEDULES[name](p, m, v)
            run = dry_run(with_transfers(on_owners(lists, ownership), ownership), ownership)
            waits, stash = list(run.waits.values()), list(run.peak_stash.values())
            if problem := disagreement(name, (p, v, m), waits, stash, run.makespan):
                print(problem, flush=True)
                return 1
        print(
            f"{name}: {len(grid):,} shapes in {process_time() - begun:,.0f} s of CPU time: every formula is met",
            flush=True,
        )
    return _runs_of_blocks()


def _runs_of_blocks() -> int:
    begun, num_shapes = process_time(), 0
    for workers, blocks in product(range(2, 17), range(1, 9)):
        for microbatches in range(workers, 65):
            num_shapes += 1
            if problem := disagreement_of_runs(workers, blocks, microbatches):
                print(problem, flush=True)
                return 1
    print(f"runs of blocks: {num_shapes:,} shapes in {process_time() - begun:,.0f} s of CPU time: as 1f1b", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
