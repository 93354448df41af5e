"""Kills by class of action: before or behind an action of each kind that a step of a case has, of any worker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import count
from random import Random

from tests.simulation.case import Case, Fault
from tests.simulation.compiled import NAMES
from tests.simulation.world import World

_SPLIT = ("zb1p", "v-min", "v-half", "zbv")
NEW = (  # the schedules for little memory, without bubbles and of two directions; slices; residuals on the host
    *(Case(6, 6, stages_per_worker=2, schedule=name, steps=2) for name in _SPLIT),
    *(Case(6, 6, stages_per_worker=2, schedule=name, redundancy="eager", log_every=2, steps=2) for name in _SPLIT),
    Case(6, 4, stages_per_worker=3, schedule="zb1p", level=2, steps=2),
    Case(3, 6, schedule="zb2p", steps=2),
    Case(3, 6, schedule="zb2p", redundancy="eager", steps=2),
    Case(4, 4, 2, schedule="dualpipe", steps=2),
    Case(4, 4, 2, schedule="dualpipe", redundancy="eager", steps=2),
    *(Case(3, 6, schedule=name, slices=2, steps=2) for name in ("1f1b", "zb1p", "zb2p")),
    Case(6, 6, stages_per_worker=2, schedule="v-half", slices=3, redundancy="eager", log_every=3, steps=2),
    *(Case(6, 6, stages_per_worker=2, schedule=name, copy_time=0.1, steps=2) for name in _SPLIT),
    Case(3, 6, schedule="zb2p", copy_time=0.1, redundancy="eager", steps=2),
)


class Watch(World):
    """A world that notes the moments before and behind each action, by its kind and the worker."""

    def __init__(self, case: Case):
        super().__init__(case, print)
        self.moments: dict[str, list[tuple[int, int]]] = {}

    def show(self, *words: int) -> None:
        """Notes an action that is done."""
        if len(words) == 3:
            worker, code, _ = words
            moment = self.workers[worker].moments
            self.moments.setdefault(NAMES[code], []).extend(((worker, moment), (worker, moment + 1)))


@cache
def moments_of(case: Case) -> dict[str, list[tuple[int, int]]]:
    """Returns the moments before and behind the actions of a case without faults, by kind."""
    watch = Watch(case)
    watch.run()
    return dict(sorted(watch.moments.items()))


def class_kills(first: int) -> Iterator[tuple[str, Case]]:
    """Yields the kinds of actions with a case for each, without end: the shapes in turn, and each kind in its turn."""
    for number in count(first):
        case, dice = NEW[number % len(NEW)], Random(number)  # noqa: S311
        moments = moments_of(case)
        kind = list(moments)[number // len(NEW) % len(moments)]
        worker, at = dice.choice(moments[kind])
        yield kind, replace(case, seed=number, spread=number % 3, faults=(Fault(worker, "moment", at),))
