"""Random failures of random jobs, each planned twice: repaired, and by the planner. `make soak-repairs` runs it."""

from __future__ import annotations

import argparse
import random
from collections import Counter

from engine.core.ownership import Grid, Redundancy
from engine.core.program.build import baseline
from engine.core.program.planner import make_plan
from engine.core.program.schedules import SCHEDULES
from tests.core.recovery_cases import Job, assert_faultless, fail, seeded
from tests.core.test_plan_repair import compared

_SHOWN = 5000  # cases between two lines


def _job(order: random.Random) -> Job:
    """Returns a job of any schedule and size that a case takes milliseconds for."""
    schedule = order.choice(sorted(SCHEDULES))
    least, most = SCHEDULES[schedule].stages_per_worker
    stages_per_worker = order.randint(least, min(most, 3))
    workers = order.randint(2, 6)
    microbatches = max(order.randint(1, 9), SCHEDULES[schedule].least_microbatches(workers))
    pipelines = order.choice([1, 1, 1, 2])
    redundancies: list[Redundancy] = ["lazy", "eager"] if pipelines == 1 else ["lazy", "eager", "reroute"]
    grid = Grid(workers * stages_per_worker, microbatches, pipelines)
    redundancy = order.choice(redundancies)
    return Job(grid, schedule, redundancy, 1, True, stages_per_worker, order.choice([0, 0, 2]))


def case(number: int, seen: Counter[str]) -> float:
    """Plans one failure twice and runs the repair to its end; returns its time by the planner's, 0 without a repair."""
    order = seeded(number)
    job = _job(order)
    machine = job.machine()
    machine.run(order, order.randint(0, sum(map(len, machine.program.values()))))
    victims = order.sample(sorted(machine.bodies), order.choice([1, 1, 1, 2]))
    failure = fail(machine, victims, order)
    if failure is None:
        seen["lost"] += 1
        return 0.0
    plan = make_plan(failure.given, baseline(job.schedule, job.grid, job.ownership().owners))
    seen["repaired" if plan.repair else "planned"] += 1
    if not plan.repair:
        return 0.0
    took, best = compared(failure, plan)
    seen["over 2 % and a forward longer"] += took > max(1.02 * best, best + 1)
    failure.machine.enter([plan.program], failure.given.ownership)
    assert failure.machine.run(order)
    assert_faultless(failure.machine)
    return took / best if best else 1.0


def main() -> None:
    """Runs the cases; the first that fails is named."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("cases", type=int)
    arguments.add_argument("--first", type=int, default=0)
    given = arguments.parse_args()
    seen, total, most = Counter[str](), 0.0, 0.0
    for number in range(given.first, given.first + given.cases):
        try:
            ratio = case(number, seen)
        except Exception:
            print(f"case {number} failed", flush=True)
            raise
        total += ratio
        most = max(most, ratio)
        done = number + 1 - given.first
        if done % _SHOWN == 0 or done == given.cases:
            mean = total / max(1, seen["repaired"])
            print(f"{done:,} cases: {dict(seen)}; by the planner's time: mean {mean:.4f}, most {most:.3f}", flush=True)


if __name__ == "__main__":
    main()
