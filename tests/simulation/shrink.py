"""Shrinks a failing case to a smaller failing case."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from tests.simulation.case import Case, Fault
from tests.simulation.run import run

_MOST_RUNS = 2000
_SIMPLEST: dict[str, Any] = {
    **{"elastic": False, "again": 0, "waiting": 0, "keep_every": 0, "slices": 1},
    **{"log_every": 0, "validate_every": 0, "ties": (), "schedule": "gpipe", "redundancy": "lazy"},
}


def shrunk(case: Case) -> Case:
    """Returns the smallest failing case that it finds; `case` fails."""
    runs = 0
    smaller = True
    while smaller and runs < _MOST_RUNS:
        smaller = False
        for tried in _smaller(case):
            runs += 1
            if run(tried).problem:
                case, smaller = tried, True
                break
    return case


def _smaller(case: Case) -> Iterator[Case]:
    """Yields cases that are a little smaller, the greatest savings first."""
    faults = case.faults
    for place in range(len(faults)):
        yield replace(case, faults=faults[:place] + faults[place + 1 :])
    yield from _fewer_deaths(case)
    yield from _fewer_losses(case)
    yield from _fewer_sleeps(case)
    if case.pipelines > 1:
        yield replace(case, pipelines=case.pipelines - 1)
    of_worker = case.stages_per_worker * case.blocks
    if case.stages > of_worker:
        yield replace(case, stages=case.stages - of_worker, ties=())
    if of_worker > 1:
        yield replace(case, stages_per_worker=1, blocks=1, schedule="gpipe")
    for field, unit in (("microbatches", case.slices), ("steps", 1), ("level", 1)):
        value = getattr(case, field) // unit
        if value > 1:
            yield replace(case, **{field: value // 2 * unit})
            yield replace(case, **{field: (value - 1) * unit})
    for field, simplest in _SIMPLEST.items():
        if getattr(case, field) != simplest:
            yield replace(case, **{field: simplest})
    for spread in {0, case.spread // 2} - {case.spread}:
        for seed in {case.seed, 0, 1, 2, 3}:
            yield replace(case, spread=spread, seed=seed)
    for place, fault in enumerate(faults):
        for less in _earlier(fault):
            yield replace(case, faults=(*faults[:place], less, *faults[place + 1 :]))


def _fewer_deaths(case: Case) -> Iterator[Case]:
    for place, moment in enumerate(case.deaths):
        for fewer in ((), (moment // 2,), (moment - 1,)):
            yield replace(case, deaths=(*case.deaths[:place], *fewer, *case.deaths[place + 1 :]))


def _fewer_losses(case: Case) -> Iterator[Case]:
    if case.hosts > len(case.losses) + 1:
        yield replace(case, hosts=case.hosts - 1)
    for place, loss in enumerate(case.losses):
        yield replace(case, losses=case.losses[:place] + case.losses[place + 1 :])
        for less in (replace(loss, at=loss.at - 1), replace(loss, which=0), replace(loss, kind="agent")):
            if less != loss and less.at:
                yield replace(case, losses=(*case.losses[:place], less, *case.losses[place + 1 :]))


def _fewer_sleeps(case: Case) -> Iterator[Case]:
    for place, sleep in enumerate(case.sleeps):
        if len(case.sleeps) > 1:
            yield replace(case, sleeps=case.sleeps[:place] + case.sleeps[place + 1 :])
        for less in (
            replace(sleep, at=sleep.at // 2),
            replace(sleep, at=sleep.at - 1),
            replace(sleep, is_double=False),
        ):
            if less != sleep and less.at:
                yield replace(case, sleeps=(*case.sleeps[:place], less, *case.sleeps[place + 1 :]))


def _earlier(fault: Fault) -> Iterator[Fault]:
    if fault.kind != "kill":
        yield replace(fault, kind="kill", length=0)
    if fault.at > 1:
        yield replace(fault, at=fault.at // 2)
        yield replace(fault, at=fault.at - 1)
    if fault.length > 1:
        yield replace(fault, length=fault.length // 2)
