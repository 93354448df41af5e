"""Predicts a run with kills: the owners at each time, the actions that a victim has finished, and the survivors.

Rules: pure and seeded. A kill is at an action in the victim's program of that step, and another worker holds each slot
of the victim. The next kill waits until all shadows are restored, unless it is to strike the healing itself. The
prediction comes from functions of the core; the test compares it with the events of the run.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from engine.core.action import STAGE_OPS, Action, Op, Program
from engine.core.faults.fault import WHENS, When
from engine.core.job.job import Job
from engine.core.job.partition import fresh_ownership
from engine.core.ownership import Ownership, Slot, with_shadows
from engine.core.program.build import build_program
from engine.core.protocol.state import Options, State, begin
from engine.core.protocol.verdicts import heirs

Place = str  # of a stage in its pipeline
PLACES: tuple[Place, ...] = ("first", "middle", "last")
OPS = (Op.SEND_F, Op.RECV_F, Op.SEND_B, Op.RECV_B, Op.HEAL, Op.F, Op.B, Op.REDUCE_GRAD, Op.LOG, Op.COMMIT, Op.STEP)
# The step of a kill, or the next one, is recovered; the next is healed.
BETWEEN_KILLS = 3


class Sort(NamedTuple):
    """The target of a kill: before, during or after an op, at the first, a middle or the last stage."""

    op: Op
    when: When
    place: Place


# The first and the last stage have no neighbour for these.
_LACKING: dict[Place, tuple[Op, ...]] = {
    "first": (Op.RECV_F, Op.SEND_B),
    "middle": (),
    "last": (Op.RECV_B, Op.SEND_F),
}
SORTS = tuple(Sort(op, when, place) for op in OPS for when in WHENS for place in PLACES if op not in _LACKING[place])


def pairs(sorts: Iterable[Sort]) -> set[tuple[object, ...]]:
    """Returns which ops are struck at which moment, and which at which place."""
    return {pair for op, when, place in sorts for pair in ((op, when), (op, place))}


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill as ``--kill`` spells it, with its victim and the actions that must have run until then.

    `beside` is the victim's action as a shadow next to the kill: it dies right after or right before that action.
    """

    text: str
    sort: Sort
    step: int
    worker: int
    done: tuple[str, ...]  # the actions of the victim that are recorded for the step
    beside: tuple[Op, When] | None = None


@dataclass(frozen=True, slots=True)
class _Strike:
    """A possible kill: an action of a worker's list, by its number there."""

    worker: int
    index: int
    action: Action
    when: When


def place_of(stage: int, job: Job) -> Place:
    """Returns the place of a stage in its pipeline."""
    return "first" if stage == 0 else "last" if stage == job.slots - 1 else "middle"


class Forecast:
    """The owners and shadows in a run, from one kill to the next."""

    def __init__(self, job: Job):
        self.job = job
        self.ownership = fresh_ownership(job)
        self.members = self.ownership.workers()

    def survives(self, worker: int) -> bool:
        """Whether other workers hold all slots of a worker."""
        return len(self.members) > 1 and not heirs(self._state(), (worker,)).lost

    def dies(self, worker: int) -> None:
        """Removes a worker; its slots go to their heirs."""
        inherited = heirs(self._state(), (worker,))
        self.members = tuple(each for each in self.members if each != worker)
        self.ownership = Ownership(self.ownership.grid, inherited.owners, inherited.shadows)

    def healed(self) -> Ownership:
        """Returns the ownership with all wanted shadows."""
        return with_shadows(self.ownership, self.job.redundancy, self.job.redundancy_level, self.members)

    def heals(self) -> None:
        """Gives every slot its shadows."""
        self.ownership = self.healed()

    def program(self) -> Program:
        """Returns the program of the next step."""
        grown = self.healed()
        new: frozenset[tuple[int, Slot]] = frozenset(
            (worker, slot)
            for slot in grown.grid.slots()
            for worker in grown.shadows_of(*slot)
            if worker not in self.ownership.shadows_of(*slot)
        )
        job = self.job
        return build_program(job.schedule, grown, job.redundancy, new, job.log_every, copy_time=job.copy_time)

    def _state(self) -> State:
        grid = self.ownership.grid
        options = Options(stages=grid.stages, redundant=self.job.redundancy != "none", sharded=grid.fsdp > 0)
        shadows = self.ownership.shadows or tuple(() for _ in grid.slots())
        return begin(options, self.ownership.owners, shadows, self.job.steps - 1, 0)._replace(members=self.members)


def plan_kills(
    job: Job, wanted: Iterable[Sort], seed: int, *, most: int = 64, between: int = BETWEEN_KILLS
) -> tuple[Kill, ...]:
    """Returns the kills of one run: first the `wanted` sorts in their order, then any possible kills."""
    dice = random.Random(seed)  # noqa: S311 - the same seed makes the same run
    left, kills = list(wanted), list[Kill]()
    forecast, step = Forecast(job), 1
    is_whole, is_open = True, True  # every slot has its shadows; the step of the last kill was not committed
    while len(kills) < most and step < job.steps - 1:
        program = forecast.program()
        possible = list(_possible(forecast, program, is_whole))
        chosen = _choose(possible, left, dice, job, any_will_do=is_whole)
        if chosen is not None:
            sort = _sort_of(chosen, job)
            if sort in left:
                left.remove(sort)
            kills.append(_kill(chosen, sort, step, program[chosen.worker], forecast.ownership))
            if sort.op is Op.HEAL:
                break  # a healed replica may stay or not: from here on timing decides about the owners
            is_open = _is_before_its_votes(chosen, program[chosen.worker])
            forecast.dies(chosen.worker)
        elif is_whole:
            break
        if is_whole and chosen is not None and is_open:
            step, is_whole = step + 1, False  # the step that restores the shadows
            continue
        step += between if is_whole or chosen is not None else between - 1
        forecast.heals()
        is_whole = True
    return tuple(kills)


def _possible(forecast: Forecast, program: Program, is_whole: bool) -> Iterator[_Strike]:
    """Yields every survivable kill; before all shadows are restored, only kills of the healing."""
    for worker, actions in program.items():
        if worker not in forecast.members or not forecast.survives(worker):
            continue
        for index, action in enumerate(actions):
            owned = forecast.ownership.owner(action.pipeline, action.stage) == worker
            if owned and (is_whole or action.op is Op.HEAL):
                yield from (_Strike(worker, index, action, when) for when in WHENS)


def _choose(
    possible: list[_Strike], wanted: list[Sort], dice: random.Random, job: Job, *, any_will_do: bool
) -> _Strike | None:
    by_sort: dict[Sort, list[_Strike]] = {}
    for each in possible:
        by_sort.setdefault(_sort_of(each, job), []).append(each)
    sort = next((each for each in wanted if each in by_sort), None)
    if sort is None and any_will_do and by_sort:
        sort = dice.choice(sorted(by_sort))
    return dice.choice(by_sort[sort]) if sort is not None else None


def _sort_of(strike: _Strike, job: Job) -> Sort:
    return Sort(strike.action.op, strike.when, place_of(strike.action.stage, job))


def _is_before_its_votes(strike: _Strike, actions: tuple[Action, ...]) -> bool:
    """Whether the victim surely has not cast its last vote, so that the step is not committed."""
    last = max(index for index, action in enumerate(actions) if action.op is Op.COMMIT)
    return strike.index < last or (strike.index == last and strike.when == "before")


def _kill(strike: _Strike, sort: Sort, step: int, actions: tuple[Action, ...], ownership: Ownership) -> Kill:
    action, index = strike.action, strike.index
    microbatch = "" if action.op in STAGE_OPS else f":{action.microbatch}"
    text = f"{step}:{action.stage}:{action.op}{microbatch}:{strike.when}@{action.pipeline}"
    done = actions[: index + (strike.when == "after")]
    near: dict[When, tuple[Action, ...]] = {
        "before": actions[index - 1 : index],
        "after": actions[index + 1 : index + 2],
    }
    opposite: dict[When, When] = {"before": "after", "after": "before"}
    as_shadow = [
        each for each in near.get(strike.when, ()) if ownership.owner(each.pipeline, each.stage) != strike.worker
    ]
    beside = (as_shadow[0].op, opposite[strike.when]) if as_shadow else None
    return Kill(text, sort, step, strike.worker, tuple(map(str, done)), beside)


def bystanders(job: Job, kills: Sequence[Kill]) -> tuple[int, ...]:
    """Returns the workers that may die too, at any time after the last kill."""
    forecast = Forecast(job)
    for kill in kills:
        if kill.sort.op is not Op.HEAL:
            forecast.heals()
        forecast.dies(kill.worker)
    return tuple(worker for worker in forecast.members if forecast.survives(worker))


def in_one_stage(job: Job) -> Job:
    """Returns the job with one worker for each pipeline, which does all in turn and without sleep.

    Every run of `job` must have its trajectory, and it starts in a fraction of the time.
    """
    alone = replace(job, redundancy="none", redundancy_level=1, log_every=0, backend="auto", fsdp=0, elastic=False)
    awake = {"forward_ms": 0, "backward_ms": 0} if job.model == "timed" else {}
    shape: dict[str, Any] = {"stages": 1, "stages_per_worker": 1, "blocks": 1, "standby": 0, "schedule": "1f1b"}
    return replace(alone, **shape, model_args=job.model_args | awake)
