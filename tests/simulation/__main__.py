"""``python -m tests.simulation``: replays a case, or tries many.

``--replay CASE`` prints what happens in a case. ``--soak N`` tries N schedules: every single kill of every shape, every
pair of kills of some, then random ones; ``--random N`` random ones only, ``--churn N`` those of churn, and
``--hosts N`` those of several hosts that are lost, ``--sleeps N`` those of coordinators that stop, from ``--first`` on.
``--classes N`` tries N kills, before or behind each kind of action of the newer schedules in turn.
``--large N`` tries N cases at each of 64, 256 and 1,024 workers, and counts messages.
``--inside N`` tries schedules until N had a hand-over inside a step. The first case that fails is shrunk and printed as
the command that replays it.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import chain, count, islice
from multiprocessing import get_context
from time import monotonic

from tests.simulation.case import Case, from_text
from tests.simulation.churn import churn_case
from tests.simulation.classes import class_kills
from tests.simulation.host_losses import host_case
from tests.simulation.judge import INSIDE
from tests.simulation.large import SIZES, figures, outcome, usage
from tests.simulation.run import run
from tests.simulation.schedules import (
    PAIRED,
    grid_cases,
    inside_case,
    pair_cases,
    random_case,
    single_kills,
    streamed_cases,
    two_stage_cases,
)
from tests.simulation.shrink import shrunk
from tests.simulation.sleeping import sleep_case

_BETWEEN_LINES_S = 10.0


def main() -> int:
    """Returns 0 if every promise was kept, 1 if not."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--replay", metavar="CASE")
    what.add_argument("--soak", type=int, metavar="N")
    what.add_argument("--random", type=int, metavar="N")
    what.add_argument("--churn", type=int, metavar="N")
    what.add_argument("--inside", type=int, metavar="N")
    what.add_argument("--hosts", type=int, metavar="N")
    what.add_argument("--sleeps", type=int, metavar="N")
    what.add_argument("--large", type=int, metavar="N")
    what.add_argument("--classes", type=int, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="NUMBER")
    given = parser.parse_args()
    if given.replay is not None:
        history = run(from_text(given.replay), tell=print)
        print(
            f"{history.phase} in epoch {history.epoch}, trace {history.trace}: {history.problem or 'all is well'}",
            flush=True,
        )
        return bool(history.problem)
    if given.large is not None or given.classes is not None:
        return classes(given.first, given.classes) if given.large is None else large(given.large)
    if given.inside is not None:
        return soak(map(inside_case, count(given.first)), enough=given.inside)
    if given.hosts is not None:
        return soak(islice(map(host_case, count(given.first)), given.hosts))
    for case_of, number in ((churn_case, given.churn), (sleep_case, given.sleeps)):
        if number is not None:
            return soak(islice(map(case_of, count(given.first)), number))
    randoms = map(random_case, count(given.first))
    cases = randoms if given.random is not None else chain(enumerated(), randoms)
    return soak(islice(cases, given.random or given.soak))


def large(cases: int) -> int:
    """Tries cases of large jobs; returns 1 if a promise was broken, else 0."""
    broken = False
    for workers in SIZES:
        usual = usage(workers)
        gc.freeze()
        with get_context("fork").Pool(initializer=gc.disable, maxtasksperchild=1) as pool:
            for line in figures(workers, pool.imap(partial(outcome, usual, once=True), range(cases))):
                broken |= "large_case" in line
                print(line, flush=True)
    return int(broken)


def classes(first: int, kills: int) -> int:
    """Tries kills by class of action; returns 1 at the first failure, else 0."""
    drawn = list(islice(class_kills(first), kills))
    for kind, number in Counter(kind for kind, _ in drawn).most_common():
        print(f"{number:>10,}  kills at {kind}")
    return soak(case for _, case in drawn)


def enumerated() -> Iterator[Case]:
    """Yields every single kill of every shape, and every pair of kills of some shapes."""
    for case in (*streamed_cases(), *two_stage_cases(), *grid_cases()):
        yield from single_kills(case)
    for case in PAIRED:
        yield from pair_cases(case)


def soak(cases: Iterator[Case], enough: int = 0) -> int:
    """Tries all cases, or until `enough` had a hand-over inside a step; returns 1 at the first failure, else 0."""
    begun = told = monotonic()
    tried = struck = recoveries = 0
    turns = Counter[str]()
    for case in cases:
        history = run(case)
        tried += 1
        struck += len(history.struck)
        recoveries += history.epoch - 1
        turns.update(history.turns)
        if history.problem:
            print(f"{history.problem}\n{case.text()}\nshrinking ...", flush=True)
            small = shrunk(case)
            print(f"{run(small).problem}\npython -m tests.simulation --replay '{small.text()}'", flush=True)
            return 1
        if enough and turns[INSIDE] == enough:
            break
        if monotonic() - told > _BETWEEN_LINES_S:
            told = monotonic()
            print(
                f"{tried:,} schedules, {struck:,} faults, {recoveries:,} epochs, {tried / (told - begun):,.0f} per s",
                flush=True,
            )
    taken = monotonic() - begun
    for turn, number in turns.most_common():
        print(f"{number:>10,}  {turn}")
    print(
        f"{tried:,} schedules, {struck:,} faults, {recoveries:,} epochs in {taken:,.0f} s: every promise was kept",
        flush=True,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
