"""The checks of the tests: no case fails, and a planted bug is caught; and small cases that need a certain rule."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice

import pytest

from tests.simulation.case import Case, Fault
from tests.simulation.run import History, run, run_on
from tests.simulation.schedules import random_case
from tests.simulation.shrink import shrunk
from tests.simulation.world import World

Bug = Callable[[pytest.MonkeyPatch], None]
SMALL = Case(stages=3, microbatches=2)
GROWN = Case(stages=2, microbatches=2, pipelines=3, redundancy="reroute")
GROWN_MORE = Case(stages=2, microbatches=2, pipelines=4, redundancy="none")


def kills(case: Case, step: int = 1) -> Iterator[Case]:
    """Yields a kill at every third moment of a step, of every worker in turn."""
    moments = run(replace(case, faults=())).moments
    for place in range(0, min(moments) // case.steps, 3):
        for worker, count in enumerate(moments):
            at = count // case.steps * step + 1 + place
            yield replace(case, seed=place, faults=(Fault(worker, "moment", at),))


def redone() -> Iterator[Case]:
    """Yields cases without deaths and retained values: sent values are computed again, and must not change a state."""
    case = Case(stages=3, microbatches=3, redundancy="none", steps=2)
    for worker in range(3):
        for at in range(2, 40, 3):
            yield replace(case, seed=at, faults=(Fault(worker, "moment", at, "suspect"),))


def troubled(count: int, kinds: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yields random cases with slow messages; with `kinds`, only those kinds of faults."""
    found = (replace(random_case(number), spread=10) for number in range(100_000))
    wanted = (case for case in found if not kinds or any(fault.kind in kinds for fault in case.faults))
    return islice((case for case in wanted if case.stages > 1), count)


def caught(cases: Iterable[Case], words: str) -> None:
    """Asserts that a case fails, and that the first failure has a reason that `words` match."""
    problems = (history.problem for history in map(run, cases))
    first = next((problem for problem in problems if problem), None)
    assert first is not None, "nobody noticed"
    assert re.search(words, first), first


def all_well(cases: Iterable[Case]) -> list[History]:
    """Returns the histories of cases, none of which may fail."""
    histories = []
    for case in cases:
        history = run_on(case)
        if history.problem:
            small = shrunk(case)
            problem = run(small).problem
            pytest.fail(f"{problem}\npython -m tests.simulation --replay '{small.text()}'")
        histories.append(history)
    return histories


def planted_in(bugs: dict[str, tuple[Bug, str]], words: str) -> Callable[[Bug], Bug]:
    """Registers a bug under the name of its function, with words of the problem."""

    def register(bug: Bug) -> Bug:
        bugs[bug.__name__] = (bug, words)
        return bug

    return register


def ended(case: Case) -> World:
    """Returns the world of a case after its end, which was judged."""
    world = World(case)
    world.run()
    world.judge.end()
    return world
