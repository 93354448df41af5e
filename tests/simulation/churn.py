"""Churn: members leave, die and are replaced by workers that wait, while the policy moves blocks, all in one history.

Rule: a random case of churn is a function of its number. Each row of `STRIKES` has one way in which the set of workers
changes, with its weight, its kind, its points, and the workers that it strikes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

from engine.core.ownership import Redundancy
from tests.simulation.case import CRAMP, HEALS_IN_TIME_US, MOVE, SHORT, Case, Fault

_MOST_REACHED = 120  # moments of a coordinator: few histories have more
_GRACE_US = 60_000_000
_VERDICT = ("fence", "inventory", "inventoried", "plan", "planned", "go", "replayed")
_JOIN = ("form next", "formed next", "enter next")
_BOUNDARY = ("commit", "stepped", "decided", "LOG", "COMMIT")


class Strike(NamedTuple):
    """One way in which the workers or their owners change; `length` is the longest, in microseconds."""

    weight: int
    kind: str
    points: tuple[str, ...]
    waiting: bool = False  # it strikes a worker that waits, or one that has waited
    length: int = 0


STRIKES = (
    Strike(6, "kill", ("moment", "moment", *_VERDICT, *_BOUNDARY, "HEAL")),
    Strike(5, "notice", ("moment", *_VERDICT, *_BOUNDARY), length=_GRACE_US),
    Strike(3, SHORT, ("moment", "moment", *_VERDICT, *_BOUNDARY)),
    Strike(2, "zombie", ("moment", *_BOUNDARY), length=60_000),
    Strike(1, "pause", ("moment", *_BOUNDARY), length=12_000_000),
    Strike(1, "suspect", ("moment", "replayed"), length=5),
    Strike(1, "late", ("moment",), length=HEALS_IN_TIME_US),
    Strike(2, MOVE, ("moment", *_BOUNDARY), length=1000),
    Strike(2, CRAMP, ("moment", *_BOUNDARY), length=1000),
    Strike(1, CRAMP, ("welcome", "waiting"), waiting=True, length=1000),
    Strike(2, "kill", ("welcome", "waiting"), waiting=True),
    Strike(4, "kill", (*_VERDICT, "HEAL", "HEAL", "stepped", "COMMIT"), waiting=True),
    Strike(1, "zombie", ("waiting", "inventory", "HEAL"), waiting=True, length=60_000),
    Strike(1, "pause", ("waiting", "HEAL", "stepped"), waiting=True, length=25_000_000),
    Strike(1, "notice", ("waiting", "planned", "HEAL", "stepped"), waiting=True, length=_GRACE_US),
    Strike(1, SHORT, ("moment", "waiting", "planned", "HEAL", "stepped", *_JOIN), waiting=True),
    Strike(2, "kill", _JOIN),
    Strike(3, "kill", (*_JOIN, "HEAL"), waiting=True),
    Strike(1, "pause", _JOIN, waiting=True, length=25_000_000),
)
_REDUNDANCIES: tuple[Redundancy, ...] = ("lazy", "lazy", "eager", "none")


def churn_case(number: int) -> Case:
    """Returns the random case of churn of a number."""
    rng = Random(f"churn {number}")  # noqa: S311
    blocks, pipelines = rng.choice((1, 2, 2, 4)), rng.choice((1, 1, 2))
    per_pipeline = rng.choice((2, 3, 3, 4)) if pipelines == 1 and blocks < 4 else rng.choice((1, 2, 2))
    case = Case(
        stages=per_pipeline * blocks,
        microbatches=rng.choice((1, 2, 3)),
        pipelines=pipelines,
        redundancy=rng.choice((*_REDUNDANCIES, "reroute", "reroute")[: 6 if pipelines > 1 else 4]),
        level=rng.choice((1, 1, 2)),
        schedule=rng.choice(("1f1b", "1f1b", "gpipe")),
        blocks=blocks,
        steps=rng.choice((4, 5, 6, 8)),
        seed=number,
        spread=rng.choice((0, 1, 3, 10)),
        elastic=rng.random() < 0.8,
        again=rng.choice((0, 0, 2, 10)),
        waiting=rng.choice((0, 1, 1, 2, 3)),
    )
    case = _under_another_schedule(case, Random(f"schedule in churn {number}"))  # noqa: S311
    streams = case.redundancy in ("lazy", "eager") and rng.random() < 0.2
    return replace(
        case,
        joining=Random(f"joins in churn {number}").randint(0, case.waiting),  # noqa: S311
        ties=((0, case.stages - 1),) if case.stages > 2 and rng.random() < 0.2 else (),
        early_stop=Random(f"early stop in churn {number}").random() < 0.5,  # noqa: S311
        log_every=1 if streams else 0,
        validate_every=rng.choice((0, 0, 0, 2)),
        keep_every=rng.choice((0, 0, 1)),
        faults=tuple(_strikes(case, rng)),
        deaths=tuple(rng.randint(1, _MOST_REACHED) for _ in range(rng.choice((0, 0, 0, 1, 1, 2)))),
    )


def _under_another_schedule(case: Case, rng: Random) -> Case:
    """Returns a case with blocks, and as many workers, under a schedule with an order of its own; half of them."""
    if case.blocks == 1 or rng.random() < 0.5:
        return case
    if rng.random() < 0.3:
        return replace(case, schedule=rng.choice(("zb1p", "zb2p")))
    schedule = rng.choice(("interleaved", "zb1p", "zbv", "v-half", "looped-bfs"))
    return replace(case, schedule=schedule, stages_per_worker=2, blocks=case.blocks // 2)


def _strikes(case: Case, rng: Random) -> Iterator[Fault]:
    able = [each for each in STRIKES if case.waiting or not each.waiting]
    for each in rng.choices(able, [one.weight for one in able], k=rng.choice((2, 3, 4, 5, 6, 7))):
        first, last = (case.num_workers, case.num_workers + case.waiting) if each.waiting else (0, case.num_workers)
        point = rng.choice(each.points)
        at = rng.randint(1, 8 * case.microbatches * case.blocks * case.steps) if point == "moment" else _often(rng)
        yield Fault(rng.randrange(first, last), point, at, each.kind, rng.randint(0, each.length))


def _often(rng: Random) -> int:
    return rng.choice((1, 1, 1, 2, 2, 3, 4))
