"""The cases to try: every single moment, pairs of moments, and random cases at the most fragile moments.

Rules: an enumeration first counts the moments of each worker in the run without faults. Random cases are a function of
their number. Uniform kills miss errors at one moment in ten thousand, so most faults fall on fence, inventory, replay,
heal and the time between a commit and its receipt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import product
from random import Random

from engine.core.ownership import Redundancy
from tests.simulation.beginning import MOMENTS as MOMENTS_OF_START
from tests.simulation.case import FOR_EVER_US, HEALS_IN_TIME_US, MOVE, POINTS, SHORT, USE, Case, Fault
from tests.simulation.run import run

_AFTER_A_VERDICT = ("fence", "inventory", "inventoried", "plan", "planned", "go", "replayed", "HEAL")
_AT_A_BOUNDARY = (*_AFTER_A_VERDICT, "commit", "stepped", "decided")
_AT_THE_END = ("commit", "stepped", "decided", "LOG", "COMMIT", "REDUCE_GRAD")
_REDUNDANCIES: tuple[Redundancy, ...] = ("none", "lazy", "eager", "reroute")
PAIRED = (
    Case(4, 4),
    Case(4, 4, redundancy="eager"),
    Case(4, 2, level=2),
    Case(3, 2, ties=((0, 2),)),
    Case(2, 2, 2),
    Case(2, 2, 2, "none"),
    Case(2, 2, 2, "reroute"),
    Case(2, 2, 2, "eager", ties=((0, 1),)),
    Case(2, 2, 3, "reroute", schedule="gpipe"),
    Case(3, 2, 2, level=2),
    Case(3, 4, log_every=1),
    Case(3, 5, redundancy="eager", level=2, log_every=2),
)
LEFT_INSIDE = (  # by a worker whose grace ends before the step
    Case(3, 4),
    Case(4, 3, redundancy="eager"),
    Case(3, 2, 2),
    Case(3, 4, log_every=1),
    Case(6, 3, blocks=2),
    Case(2, 3, 2, "reroute"),
    Case(3, 2, ties=((0, 2),), schedule="gpipe"),
)
_STREAMED = (Case(3, 4, steps=2, log_every=1), Case(2, 5, 2, steps=2, log_every=2))
_GRACE_US = 60_000_000
_HEALS_US, _FOR_EVER_US = 900_000, FOR_EVER_US
_LINK_FAULTS = (  # an odd number, so that each has both timings
    *product(("silent", "silent there", "silent back", "middle"), (_HEALS_US, _FOR_EVER_US)),
    *(("silent", 20_000_000), ("network", _FOR_EVER_US)),
    *(("flap", HEALS_IN_TIME_US), ("late", 10_000_000), ("duplicated", 60_000_000)),
)
_TIMING = (0, 3)  # seeds without spread: the exit is seen late and transfers arrive; it is seen early and they are lost


def first_step(case: Case, moments: int) -> range:
    """Returns the moments of a worker in the first step, from its begin to the commit; `moments` is those of all."""
    return range(MOMENTS_OF_START + 1, MOMENTS_OF_START + (moments - MOMENTS_OF_START) // case.steps + 1)


def single_kills(case: Case, stride: int = 1, first: int = 0) -> Iterator[Case]:
    """Yields a case for every `stride`-th moment of every worker in the first step, with both timings."""
    for worker, moments in enumerate(run(case).moments):
        for moment in first_step(case, moments)[first % stride :: stride]:
            for seed in _TIMING:
                yield replace(case, seed=seed, faults=(Fault(worker, "moment", moment),))


def startup_deaths(case: Case) -> Iterator[Case]:
    """Yields cases with a death before the first step: of each worker, at each point of its start."""
    for worker in range(len(run(case).moments)):
        for point in ("welcome", "partition", "ready"):
            for seed in _TIMING:
                yield replace(case, steps=1, seed=seed, faults=(Fault(worker, point),))


def take_overs(case: Case, stride: int = 1, first: int = 0) -> Iterator[Case]:
    """Yields a case for every `stride`-th moment of the coordinator, at which it dies."""
    for moment in range(1 + first % stride, run(case).reached + 1, stride):
        yield replace(case, seed=_TIMING[moment % 2], deaths=(moment,))


def hand_overs(case: Case, stride: int = 1, first: int = 0) -> Iterator[Case]:
    """Yields cases in which a worker gives notice in the first step and leaves, and then a worker dies at any moment.

    The hand-over is prepared while they train, and the first of these cases has no death.
    """
    place = first
    for leaver in range(len(run(case).moments)):
        notice = Fault(leaver, "moment", 8, "notice", _GRACE_US)
        quiet = replace(case, faults=(notice,))
        yield quiet
        for worker, moments in enumerate(run(quiet).moments):
            for moment in range(first_step(case, moments).stop, moments + 1):
                place += 1
                if place % stride == 0:
                    kill = Fault(worker, "moment", moment)
                    yield replace(quiet, seed=_TIMING[place // stride % 2], faults=(notice, kill))


def link_faults(case: Case, stride: int = 1, first: int = 0) -> Iterator[Case]:
    """Yields cases in which links of a worker fail at every `stride`-th moment of the first step."""
    place = first
    for worker, moments in enumerate(run(case).moments):
        for moment in first_step(case, moments):
            place += 1
            if place % stride == 0:
                kind, length = _LINK_FAULTS[place // stride % len(_LINK_FAULTS)]
                fault = Fault(worker, "moment", moment, kind, length)
                yield replace(case, seed=_TIMING[place // stride % 2], faults=(fault,))


def random_link_fault(number: int) -> Case:
    """Returns the random case of a number with a fault of links, at most one other fault; one coordinator may die."""
    rng = Random(number)  # noqa: S311
    case = random_case(number)
    kind, length = rng.choice(_LINK_FAULTS)
    worker = rng.randrange(case.num_workers)
    broken = Fault(worker, "moment", rng.randint(4, 12 * case.microbatches * case.steps), kind, length)
    return replace(
        case, faults=(broken, *case.faults[: rng.choice((0, 1, 1))]), deaths=case.deaths[: rng.choice((0, 1))]
    )


def leavings(count: int) -> Iterator[Case]:
    """Yields random cases in which a worker leaves, and at its hand-over others die, leave, or stop the job."""
    for number in range(count):
        rng = Random(number)  # noqa: S311
        stages = rng.choice((2, 3, 3, 4))
        leaver, *others = rng.sample(range(stages), stages)
        notice = Fault(leaver, "moment", rng.randint(4, 40), "notice", _GRACE_US)
        struck = [others[0]] if rng.random() < 0.8 else [leaver, *others]
        kind = rng.choice(("kill", "kill", "notice", "stop"))
        faults = [
            Fault(worker, rng.choice(_AT_A_BOUNDARY), rng.choice((1, 1, 2)), kind, _GRACE_US) for worker in struck
        ]
        if rng.random() < 0.3:
            faults.append(Fault(leaver, "stepped", 1, "stop"))
        yield Case(stages, 2, steps=4, seed=number, spread=rng.choice((3, 10)), faults=(notice, *faults))


def moving_case(number: int) -> Case:
    """Returns the random case of a number in which slots move, up to two other faults strike, and coordinators die."""
    rng = Random(number)  # noqa: S311
    case = replace(random_case(number), steps=rng.choice((4, 5, 6)))
    early = (rng.choice(("moment", *_AT_A_BOUNDARY)), rng.choice((1, 2, 3)))
    late = ("moment", rng.randint(1, 10 * case.microbatches * case.steps))
    moves = [Fault(rng.randrange(case.num_workers), *at, MOVE, rng.randrange(1000)) for at in (early, late)]
    if rng.random() < 0.3:
        moves.append(replace(moves[-1], at=moves[-1].at + 1))  # the same again
    return replace(case, faults=(*moves, *case.faults[: rng.choice((0, 1, 1, 2))]))


def changing_case(number: int) -> Case:
    """Returns the random case of a number in which the schedule is changed, slots move, faults strike."""
    rng, case = Random(number), moving_case(number)  # noqa: S311
    uses = (
        Fault(rng.randrange(case.num_workers), "moment", rng.randint(1, 10 * case.microbatches * case.steps), USE, each)
        for each in rng.choices(range(4), k=rng.choice((1, 2, 3)))
    )
    return replace(case, faults=(*uses, *case.faults[rng.choice((0, 2)) :]))


def short_notices(case: Case, stride: int = 1, first: int = 0) -> Iterator[Case]:
    """Yields a short notice for every `stride`-th moment of every worker in the second step."""
    place = first
    for worker, moments in enumerate(run(case).moments):
        step = first_step(case, moments)
        for moment in range(step.stop, step.stop + len(step)):
            place += 1
            if place % stride == 0:
                yield replace(case, seed=_TIMING[place // stride % 2], faults=(Fault(worker, "moment", moment, SHORT),))


def parting_case(number: int) -> Case:
    """Returns the random case of a number in which up to two workers hand over inside a step, and others die."""
    rng = Random(number)  # noqa: S311
    case = replace(random_case(number), steps=rng.choice((3, 4)))
    at = [("moment", rng.randint(30, 12 * case.microbatches * case.steps)) for _ in range(2)]
    struck = rng.sample(range(case.num_workers), min(case.num_workers, rng.choice((1, 1, 2))))
    short = [Fault(worker, *moment, SHORT) for worker, moment in zip(struck, at, strict=False)]
    return replace(case, faults=(*short, *case.faults[: rng.choice((0, 1, 1, 2))]))


def inside_case(number: int) -> Case:
    """Returns the random case of a number in which a worker hands over inside the second step, and one more may die."""
    rng = Random(f"inside {number}")  # noqa: S311
    case = replace(rng.choice(LEFT_INSIDE), steps=rng.choice((2, 2, 3)), seed=number, spread=rng.choice((0, 0, 3, 10)))
    moments = _moments(replace(case, seed=0, spread=0))
    leaver, other = rng.sample(range(len(moments)), 2)
    step = first_step(case, moments[leaver])
    faults = [Fault(leaver, "moment", step.stop + rng.randrange(len(step)), SHORT)]
    if rng.random() < 0.4:
        kind = rng.choice(("kill", "kill", SHORT))
        faults.append(Fault(rng.choice((leaver, other)), "moment", rng.randrange(step.stop, 3 * step.stop), kind))
    return replace(case, faults=tuple(faults))


@cache
def _moments(case: Case) -> tuple[int, ...]:
    return run(case).moments


def waiting_case(number: int) -> Case:
    """Returns the random case of a number in which up to three workers wait, and some of them die or stop.

    A waiting worker is struck while it waits, when a verdict takes it in, or when it is half healed.
    """
    rng = Random(number)  # noqa: S311
    case = moving_case(number) if rng.random() < 0.3 else random_case(number)
    case = replace(case, steps=rng.choice((3, 4, 5)), waiting=rng.choice((1, 1, 2, 3)))
    faults = list(case.faults)
    for worker in range(case.num_workers, case.num_workers + case.waiting):
        if rng.random() < 0.6:
            point = rng.choice(("welcome", "waiting", *_AT_A_BOUNDARY, "HEAL", "HEAL"))
            kind = rng.choice(("kill", "kill", "kill", "zombie", "pause", "notice"))
            longest = {"kill": 0, "zombie": 60_000, "pause": 25_000_000, "notice": _GRACE_US}[kind]
            faults.append(Fault(worker, point, rng.choice((1, 1, 2)), kind, rng.randint(0, longest)))
    return replace(case, faults=tuple(faults))


def joining_case(number: int) -> Case:
    """Returns the random case of a number in which waiting workers join without a failure.

    Workers die or stop while the next group is formed, when it is entered, and when a joiner is half healed.
    """
    rng = Random(f"joins of {number}")  # noqa: S311
    case = waiting_case(number)
    case = replace(case, steps=rng.choice((4, 5, 6, 8)), joining=rng.randint(1, case.waiting))
    everyone = range(case.num_workers + case.waiting)
    faults = list(case.faults if rng.random() < 0.5 else case.faults[: rng.choice((0, 1))])
    if rng.random() < 0.7:  # a joiner is wanted as an owner
        faults.append(Fault(rng.randrange(case.num_workers), "moment", rng.randint(4, 60), MOVE, rng.randrange(1000)))
    for _ in range(rng.choice((0, 1, 1, 2))):
        point = rng.choice(("form next", "formed next", "enter next", "enter next", "HEAL", "decided"))
        kind = rng.choice(("kill", "kill", "kill", "pause", "notice", "silent"))
        length = {"kill": 0, "pause": 25_000_000, "notice": _GRACE_US, "silent": 3_000_000}[kind]
        faults.append(Fault(rng.choice(everyone), point, rng.choice((1, 1, 2, 3)), kind, length))
    return replace(case, faults=tuple(faults))


def grid_cases(steps: int = 2) -> Iterator[Case]:
    """Yields the fault-free case of every enumerated shape, small ones first."""
    shapes = sorted(product((1, 2), (2, 3, 4, 6), (2, 4, 8)), key=lambda shape: shape[0] * shape[1] * shape[2])
    for (pipelines, stages, microbatches), redundancy, schedule in product(shapes, _REDUNDANCIES, ("1f1b", "gpipe")):
        if pipelines > 1 or redundancy != "reroute":
            yield Case(stages, microbatches, pipelines, redundancy, schedule=schedule, steps=steps)


def streamed_cases() -> Iterator[Case]:
    """Yields fault-free cases of jobs that stream."""
    redundancies: tuple[Redundancy, ...] = ("lazy", "eager")
    for case, redundancy, schedule in product(_STREAMED, redundancies, ("1f1b", "gpipe")):
        yield replace(case, redundancy=redundancy, schedule=schedule)


def two_stage_cases() -> Iterator[Case]:
    """Yields fault-free cases in which a worker has two stages."""
    for schedule in ("interleaved", "zbv"):
        small = Case(4, 2, stages_per_worker=2, schedule=schedule, steps=2)
        yield from (small, replace(small, redundancy="eager"), replace(small, log_every=1, microbatches=3))


def small_cases() -> list[Case]:
    """Returns the fault-free cases of the small shapes."""
    return [case for case in grid_cases() if case.pipelines * case.stages <= 6 and case.microbatches <= 4]


def pair_cases(case: Case, stride: int = 1) -> Iterator[Case]:
    """Yields pairs of kills: each `stride`-th one of the first step, with each `stride`-th moment of other workers."""
    place = 0
    for nth, one in enumerate(single_kills(case)):
        if nth % (2 * stride):  # both timings of a kill are next to each other
            continue
        (kill,) = one.faults
        for worker, moments in enumerate(run(one).moments):
            for moment in range(max(MOMENTS_OF_START, kill.at // 2), moments + 1) if worker != kill.worker else ():
                place += 1
                if place % stride == 0:
                    second = Fault(worker, "moment", moment)
                    yield replace(one, seed=_TIMING[place // stride % 2], faults=(kill, second))


def random_case(number: int) -> Case:
    """Returns the random case of a number."""
    rng = Random(number)  # noqa: S311
    stages = rng.choice((1, 2, 2, 3, 3, 4, 4, 6))
    pipelines = rng.choice((1, 1, 1, 2, 2, 3)) if stages < 6 else 1
    policies: tuple[Redundancy, ...] = (
        "lazy",
        "lazy",
        "eager",
        "eager",
        "reroute" if pipelines > 1 else "lazy",
        "none",
    )
    case = Case(
        stages=stages,
        microbatches=rng.choice((1, 2, 2, 3, 4)),
        pipelines=pipelines,
        redundancy=rng.choice(policies),
        level=rng.choice((1, 1, 1, 2)),
        schedule=rng.choice(("1f1b", "gpipe")),
        ties=((0, stages - 1),) if stages > 2 and rng.random() < 0.3 else (),
        steps=rng.choice((2, 3, 4)),
        seed=number,
        spread=rng.choice((0, 1, 3, 10)),
    )
    if stages % 2 == 0 and rng.random() < 0.25:
        case = replace(case, stages_per_worker=2, schedule=rng.choice(("interleaved", "zbv")))
    elif stages in (4, 6) and Random(f"blocks of {number}").random() < 0.3:  # noqa: S311
        case = replace(case, blocks=2)
    if case.schedule == "1f1b" and Random(f"eager-1f1b of {number}").random() < 0.3:  # noqa: S311
        case = replace(case, schedule="eager-1f1b")
    faults = _faults(case, rng)
    deaths = tuple(rng.randint(1, 20 * case.steps * stages) for _ in range(rng.choice((0, 0, 0, 1, 1, 2))))
    case = replace(case, deaths=deaths, validate_every=rng.choice((0, 0, 0, 1, 2)))
    if case.validate_every and Random(f"early stop of {number}").random() < 0.5:  # noqa: S311
        case = replace(case, early_stop=True, steps=case.steps + 2)
    streams = case.redundancy in ("lazy", "eager") and rng.random() < 0.4
    return replace(case, faults=faults, log_every=rng.choice((1, 1, 2)) if streams else 0)


def _faults(case: Case, rng: Random) -> tuple[Fault, ...]:
    workers = list(range(case.num_workers))
    rng.shuffle(workers)
    until_the_last = rng.random() < 0.2
    count = len(workers) - 1 if until_the_last else min(len(workers), rng.choice((1, 2, 2, 3)))
    faults = [_kill(case, rng, worker, nth) for nth, worker in enumerate(workers[:count])]
    if case.redundancy == "none" and case.pipelines == 1 and rng.random() < 0.8:
        # A death would end the job; without one, sent values that are not retained must be computed again.
        faults = [replace(fault, kind="suspect") for fault in faults]
    if rng.random() < 0.25:
        faults[-1:] = [_other(case, rng, rng.choice(workers))]
    if rng.random() < 0.1:
        faults.append(_other(case, rng, rng.choice(workers)))
    return tuple(faults)


def _kill(case: Case, rng: Random, worker: int, nth: int) -> Fault:
    drawn = rng.random()
    if nth and drawn < 0.55:  # in the recovery from an earlier fault
        point = rng.choice(_AFTER_A_VERDICT)
        return Fault(worker, point, rng.randint(1, 8) if point == "replayed" else rng.choice((1, 1, 1, 2, 3)))
    if drawn < 0.75:
        return Fault(worker, rng.choice(_AT_THE_END), rng.randint(1, case.steps))
    return Fault(worker, "moment", rng.randint(1, 14 * case.microbatches * case.steps))


def _other(case: Case, rng: Random, worker: int) -> Fault:
    """Returns a fault that is not a kill."""
    kind = rng.choice(("zombie", "zombie", "pause", "link", "suspect", "suspect", "notice", "notice", "notice", "stop"))
    point = rng.choice(POINTS)
    at = rng.randint(1, 12 * case.microbatches * case.steps) if point == "moment" else rng.choice((1, 1, 2, 3))
    longest = {"zombie": 60_000, "pause": 12_000_000, "link": 30_000, "suspect": 5, "notice": 60_000_000, "stop": 0}[
        kind
    ]
    return Fault(worker, point, at, kind, rng.randint(0, longest))
