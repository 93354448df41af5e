"""Cases of several hosts that are lost: the one that coordinates at each moment, and more of them after it.

Rules: a random case is a function of its number. About half of the later losses come within a few moments of the one
before: while another host takes over, or at the same moment.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

from engine.core.ownership import Redundancy
from tests.simulation.case import HOST_KINDS, Case, Fault, HostLoss

SMALL_HOSTS = Case(stages=3, microbatches=2, steps=3, hosts=3)
_REDUNDANCIES: tuple[Redundancy, ...] = ("lazy", "lazy", "lazy", "eager")
_POINTS = (
    "moment",
    "moment",
    "stepped",
    "commit",
    "COMMIT",
    "LOG",
    "HEAL",
    "inventory",
    "inventoried",
    "planned",
    "go",
)
_GRACE_US = 60_000_000
_SOON = 14  # moments: those of a take-over are about as many


def lost_at_every_moment(case: Case, moments: int, stride: int = 1, first: int = 1) -> Iterator[Case]:
    """Yields the loss of the host that coordinates at some moments, in each of the ways."""
    for place, at in enumerate(range(first, moments + 1, stride)):
        for kind in HOST_KINDS:
            yield replace(case, seed=place, spread=3 * (place % 2), losses=(HostLoss(at, 0, kind),))


def host_case(number: int) -> Case:
    """Returns the random case of several hosts of a number."""
    rng = Random(f"hosts {number}")  # noqa: S311
    pipelines = rng.choice((1, 1, 1, 2))
    hosts = rng.choice((2, 3, 3, 4))
    case = Case(
        stages=rng.choice((2, 3)) if pipelines > 1 else rng.choice((2, 3, 4, 5, 6)),
        microbatches=rng.choice((1, 2, 2, 3)),
        pipelines=pipelines,
        redundancy=rng.choice((*_REDUNDANCIES, "reroute", "reroute")[: 6 if pipelines > 1 else 4]),
        level=rng.choice((1, 1, 2)),
        schedule=rng.choice(("1f1b", "1f1b", "gpipe")),
        steps=rng.choice((2, 3, 4)),
        seed=number,
        spread=rng.choice((0, 1, 3, 10)),
        keep_every=rng.choice((0, 0, 1)),
        validate_every=rng.choice((0, 0, 0, 2)),
        waiting=rng.choice((0, 0, 0, 1)),
        hosts=hosts,
    )
    if Random(f"early stop on hosts {number}").random() < 0.2:  # noqa: S311
        case = replace(case, early_stop=True, validate_every=1, steps=case.steps + 2)
    faults = tuple(_faults(case, rng))
    return replace(case, hosts=min(hosts, case.num_workers), losses=tuple(_losses(case, rng)), faults=faults)


def _losses(case: Case, rng: Random) -> Iterator[HostLoss]:
    of_step = case.num_workers * 4 + case.hosts * 8
    begun = 6 * case.num_workers
    at = 0
    for _ in range(min(rng.choice((1, 1, 2, 2, 3)), case.hosts - (rng.random() < 0.95))):
        is_soon = at and rng.random() < 0.5
        at = (
            at + rng.choice((0, 1, 2, rng.randint(0, _SOON)))
            if is_soon
            else rng.randint(begun, begun + of_step * case.steps)
        )
        yield HostLoss(at, rng.choice((0, 0, 1, 2)), rng.choice(HOST_KINDS))


def _faults(case: Case, rng: Random) -> Iterator[Fault]:
    for kind in rng.choice(((), (), (), ("kill",), ("notice",), (rng.choice(HOST_KINDS),))):
        point = rng.choice(_POINTS)
        at = rng.randint(4, 10 * case.microbatches * case.steps) if point == "moment" else rng.choice((1, 1, 2, 3))
        yield Fault(rng.randrange(case.num_workers), point, at, kind, _GRACE_US if kind == "notice" else 0)
