"""``python -m tests.e2e.stall_soak``: how long training stood, by the report and by an observer.

Each run has one failure of every kind, injected or made from outside, each at a random moment in a random worker. The
report must be within 5 ms or 2 % of the truth. The deviations are printed with the command that repeats the run, and
its folder is kept.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from engine.core.faults.fault import Fault
from tests.e2e.stall_observer import Case, Runs, Strike, job_of
from tests.kills import parse_kill

KINDS = ("kill", "stop", "hang", "notice", "raise")
STAGES = len(KINDS) + 1
_BETWEEN = 7  # steps from one failure to the next: to hand over, restore shadows, leave, and be usual again
_BETWEEN_LINES_S = 20.0
_GRACE_NS = 60 * 10**9
_FAULTS = {"notice": "terminate"}  # kind -> kind of fault, where it has another name


def main() -> int:
    """Returns 0 if every report was true, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.stall_soak")
    parser.add_argument("--cases", type=int, default=200, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="the first run's; each one has its own")
    given = parser.parse_args()
    folder, begun = Path(tempfile.mkdtemp(prefix="stall-soak-")), monotonic()
    found: dict[str, list[Case]] = defaultdict(list)
    num_failures, is_wrong, told = 0, False, monotonic()
    with Runs(folder) as runs:
        for seed in count(given.seed):
            faults, strikes = plan_of(seed)
            num_failures += len(faults) + len(strikes)
            for case in runs.cases({"stages": STAGES, "steps": steps_of(seed)}, faults, strikes):
                kind = kind_of(case, faults, strikes)
                found[kind].append(case)
                if not case.is_true:
                    is_wrong = True
                    print(f"wrong: {kind}: {told_by(case)}\n  python -m tests.e2e.stall_soak --cases 1 --seed {seed}")
            is_over = num_failures >= given.cases
            if is_over or monotonic() - told > _BETWEEN_LINES_S:
                told = monotonic()
                print(f"{num_failures} failures in {seed + 1 - given.seed} runs, {told - begun:.0f} s", flush=True)
            if is_over:
                break
    print(summary(found))
    if is_wrong:
        print(f"events and logs are in {folder}")
    else:
        shutil.rmtree(folder)
    return int(is_wrong)


def plan_of(seed: int) -> tuple[list[Fault], list[Strike]]:
    """Returns the failures of a run: injected ones if the seed is even, else strikes from outside."""
    dice = random.Random(seed)  # noqa: S311 - the same seed makes the same run
    kinds = dice.sample(KINDS, len(KINDS))
    victims = dice.sample(range(STAGES), len(KINDS))
    steps = failing_steps(seed)
    if seed % 2:
        return [], [
            Strike(kind, worker, step - 1, dice.random() * 0.08)
            for kind, worker, step in zip(kinds, victims, steps, strict=True)
        ]
    return [injected(dice, *each) for each in zip(kinds, victims, steps, strict=True)], []


def injected(dice: random.Random, kind: str, stage: int, step: int) -> Fault:
    """Returns a fault that strikes the owner of a stage in a random action of a step."""
    job = job_of(Path(), STAGES, step + 1)
    fault = parse_kill(f"{step}:{stage}:{dice.choice('FB')}:{dice.randrange(job.microbatches)}:before", job)
    parameters: dict[str, Any] = {"grace_ns": _GRACE_NS} if kind == "notice" else {}
    return replace(fault, do=_FAULTS.get(kind, kind), parameters=parameters)


def failing_steps(seed: int) -> list[int]:
    """Returns the steps in which a run fails; some come so early, or so soon, that no step is usual yet."""
    first = (6, 1, 2, 4)[seed % 4 if seed % 3 == 0 else 0]
    steps = [first + _BETWEEN * number for number in range(len(KINDS))]
    return [first, first + 2, *steps[2:]] if seed % 5 == 4 else steps


def steps_of(seed: int) -> int:
    """Returns the number of steps of a run."""
    return failing_steps(seed)[-1] + _BETWEEN


def kind_of(case: Case, faults: Sequence[Fault], strikes: Sequence[Strike]) -> str:
    """Returns how a recovery began, from the plan: by hand or injected, and the kind of failure."""
    planned = {strike.step + 1: f"{strike.do} from outside" for strike in strikes}
    planned |= {int(fault.id.partition(":")[0]): f"{fault.do} injected" for fault in faults}
    return planned[max(step for step in planned if step <= case.row["step"])]


def summary(found: dict[str, list[Case]]) -> str:
    """Returns a line for each kind, and one for all."""
    lines = [_line(kind, cases) for kind, cases in sorted(found.items())]
    return "\n".join([*lines, _line("all", [case for cases in found.values() for case in cases])])


def told_by(case: Case) -> str:
    """Returns both sides of a case."""
    told = f"step {case.row['step']}: the report says {case.row['stall_ms']:.2f} to {case.row['stall_most_ms']:.2f} ms"
    return f"{told}, the observer {case.stood_ms or float('nan'):.2f} ms, {case.most_ms:.2f} ms at most"


def _line(kind: str, cases: list[Case]) -> str:
    off_ms = sorted(abs(case.difference_ms) for case in cases)
    num_bounds = sum(bool(case.row["stall_bound"]) for case in cases)
    num_better = sum(case.difference_ms < -case.tolerance_ms for case in cases)
    p99_ms = off_ms[max(0, round(0.99 * len(off_ms)) - 1)]
    return (
        f"{kind:<22} {len(cases):4} recoveries, {num_bounds} of them bounds; off by {p99_ms:.2f} ms (p99), "
        f"{off_ms[-1]:.2f} ms at worst; {num_better} better than the truth"
    )


if __name__ == "__main__":
    sys.exit(main())
