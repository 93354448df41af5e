"""How the tests of planted bugs look for them: small cases that need a rule, and what it means that one is caught."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice

from tests.simulation.case import Case, Fault
from tests.simulation.run import run
from tests.simulation.schedules import random_case

SMALL = Case(stages=3, microbatches=2)
GROWN = Case(stages=2, microbatches=2, pipelines=3, redundancy="reroute")


def kills(case: Case, step: int = 1) -> Iterator[Case]:
    """Yields a kill at every third moment of a step, of every worker in turn."""
    moments = run(replace(case, faults=())).moments
    for place in range(0, min(moments) // case.steps, 3):
        for worker, count in enumerate(moments):
            at = count // case.steps * step + 1 + place
            yield replace(case, seed=place, faults=(Fault(worker, "moment", at),))


def redone() -> Iterator[Case]:
    """Yields cases in which nobody dies and nothing is retained: what was sent must be made again without a trace."""
    case = Case(stages=3, microbatches=3, redundancy="none", steps=2)
    for worker in range(3):
        for at in range(2, 40, 3):
            yield replace(case, seed=at, faults=(Fault(worker, "moment", at, "suspect"),))


def troubled(count: int, kinds: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yields random cases with slow messages, those with some kinds of faults only."""
    found = (replace(random_case(number), spread=10) for number in range(100_000))
    wanted = (case for case in found if not kinds or any(fault.kind in kinds for fault in case.faults))
    return islice((case for case in wanted if case.stages > 1), count)


def caught(cases: Iterable[Case], words: str) -> None:
    """Asserts that some case fails, and that the first one does so for the reason that `words` match."""
    problems = (history.problem for history in map(run, cases))
    first = next((problem for problem in problems if problem), None)
    assert first is not None, "nobody noticed"
    assert re.search(words, first), first
