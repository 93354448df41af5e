"""Coordinators that stop for a while: alone, with their agent, or as all processes of a paused machine do.

    alone         the agent waits for an answer; after ten seconds another one takes over, and is told again
    with agent    workers go on, and what they say waits
    all           as in a container that is paused; the clock goes on

Rules: an input has the time at which the agent took it, also if the coordinator stops before it decides, and if another
one is told it again. No such stop is a reason to put a worker out. Actions are slow, and a worker inside one does not
run: all that speaks for it is that nobody has watched it for long.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

from engine.core.messages import BorderMessage, ReadyMessage, WaitingMessage
from engine.core.protocol import inputs_outputs
from engine.core.protocol.events import JobRestart, Loading, Notice, Sight, Takeover, WorkerWord
from engine.core.protocol.inputs_outputs import CoordinatorInput, ProcessExit
from tests.simulation.case import Case, Fault, Sleep
from tests.simulation.coordinator import Coordinator, taken_over
from tests.simulation.links import MS, TICK
from tests.simulation.worker import Worker
from tests.simulation.world import World

KINDS = ("agent", "all", "alone")
_ANSWER_US, _ROLE_US = 10_000_000, 15_000_000
_SHORTEST_US, _LONGEST_US = 100_000, 60_000_000
_SLOWER = 100  # than usual: a step takes seconds
_MOST_REACHED = 60
_GRACE_US = 120_000_000


class SleepingCoordinator(Coordinator):
    """A coordinator that may stop before it decides on an input, and before it carries out what it has written."""

    world: SleepWorld
    is_asleep = False
    given: CoordinatorInput | None = None  # its present input

    @property
    def is_busy(self) -> bool:
        """Whether it takes no input now."""
        return self.is_writing or self.is_asleep

    def _decide(self, given: CoordinatorInput) -> None:
        self.given = given
        if not self.world.falls_asleep(self, partial(super()._decide, given)):
            super()._decide(given)

    def _carry_out(self, found: tuple[inputs_outputs.CoordinatorOutput, ...]) -> None:
        if found and self.world.falls_asleep(self, partial(self._told, found)):
            return
        self._told(found)

    def _told(self, found: tuple[inputs_outputs.CoordinatorOutput, ...]) -> None:
        if self.given is not None:
            self.world.has_handled(self.given)
        super()._carry_out(found)

    def wakes(self, what: partial[None]) -> None:
        """Goes on after a stop, unless it was killed."""
        if self.alive:
            self.is_asleep = False
            what()
            self._take_next()
            self.world.tick_after(MS)


class SleepWorld(World):
    """One job whose coordinators stop."""

    coordinator_of = SleepingCoordinator
    coordinator: SleepingCoordinator

    def __init__(self, case: Case, tell: Any = None):
        self.sleeps = sorted(case.sleeps, key=lambda sleep: sleep.at)
        self.known: list[CoordinatorInput] = []  # what the next coordinator is told again
        self.count = 0  # moments of all coordinators
        super().__init__(case, tell)
        self.tick_after(TICK // 2)

    def cost(self, code: int) -> int:
        """Returns the time of an action."""
        return super().cost(code) * _SLOWER

    def falls_asleep(self, coordinator: SleepingCoordinator, what: partial[None]) -> bool:
        """Counts a moment; returns whether the coordinator stops at it, and does the rest later."""
        self.count += 1
        if not self.sleeps or self.sleeps[0].at > self.count:
            return False
        sleep = self.sleeps.pop(0)
        self.turns.add(f"coordinator sleeps: {sleep.kind}")
        coordinator.is_asleep = True
        length = sleep.length * 1000
        self.push(length, coordinator.wakes, what)
        if sleep.kind == "all":
            for worker in self.workers:
                if worker.alive and not worker.paused:
                    worker.paused = True
                    self.push(length + self.delay() * 50, worker.resume)
        elif sleep.kind == "alone" and sleep.length > _ANSWER_US:
            self.push((_ANSWER_US + _ROLE_US * sleep.is_double) * 1000, self._replace, coordinator)
        return True

    def has_handled(self, given: CoordinatorInput) -> None:
        """Keeps an input whose answer the agent has carried out."""
        if isinstance(given, JobRestart):
            self.known.clear()
        elif _is_told_again(given) and given not in self.known:
            self.known.append(given)

    def _replace(self, before: SleepingCoordinator) -> None:
        """Lets another coordinator go on, which is told again what this one knew, with the times of then."""
        if not before.alive or not before.is_asleep:
            return
        before.alive = False
        self.turns.add("another coordinator takes over")
        self.coordinator = new = SleepingCoordinator(self, taken_over(self).state)
        new.take(Takeover)
        for given in (*self.known, *([before.given] if before.given else ())):
            new.take(partial(_as_it_was, given))
        for kind, words in before.waiting:
            new.take(kind, *words)
        self.tick_after(MS)

    def _tick(self) -> None:
        if self.is_over():
            return
        if not self.coordinator.is_busy:
            for worker in self.workers:
                if worker.alive and not worker.paused:
                    self.coordinator.take(WorkerWord, worker.number, worker.heartbeat(), self.node_of(worker.number))
            living = [worker for worker in self.workers if worker.alive]
            self.coordinator.take(
                inputs_outputs.ClockTick, {}, {worker.number: self._sight(worker) for worker in living}
            )
        if not self.coordinator.is_asleep:
            self.tick_after(TICK // 2)

    def _sight(self, worker: Worker) -> Sight:
        """Returns a look at a worker: inside an action it waits for something, and does not run."""
        inside_ns = self.now - worker.woken_ns if worker.busy else 0
        at = (worker.epoch, worker.step, worker.moments, worker.busy)
        return Sight(*at, inside_ns, MS, Loading.NONE, "S", worker.moments, worker.moments)


def _as_it_was(given: CoordinatorInput, now_ns: int) -> CoordinatorInput:
    return given


def sleep_case(number: int) -> Case:
    """Returns the random case of a number: one or two coordinators stop, and a worker may die, wait or leave."""
    rng = Random(f"sleeps {number}")  # noqa: S311
    stages = rng.choice((2, 3, 3, 4))
    case = Case(
        stages=stages,
        microbatches=rng.choice((1, 2, 3)),
        redundancy=rng.choice(("lazy", "lazy", "eager")),
        steps=rng.choice((2, 3)),
        seed=number,
        spread=rng.choice((0, 1, 3, 10)),
        waiting=rng.choice((0, 0, 1)),
    )
    sleeps = [_sleep(rng, number) for _ in range(rng.choice((1, 1, 2)))]
    faults = []
    for kind in rng.choice(((), (), ("kill",), ("notice",))):
        at = rng.randint(8, 10 * case.microbatches * case.steps)
        faults.append(Fault(rng.randrange(stages), "moment", at, kind, _GRACE_US if kind == "notice" else 0))
    return replace(case, sleeps=tuple(sleeps), faults=tuple(faults))


def _sleep(rng: Random, number: int) -> Sleep:
    length = int(_SHORTEST_US * (_LONGEST_US / _SHORTEST_US) ** rng.random())
    return Sleep(rng.randint(1, _MOST_REACHED), length, KINDS[number % 3], rng.random() < 0.5)


def _is_told_again(given: CoordinatorInput) -> bool:
    """Whether a coordinator that takes over must be told an input again: an end, border, join or notice comes once."""
    return isinstance(given, ProcessExit | Notice) or (
        isinstance(given, WorkerWord) and isinstance(given.message, BorderMessage | ReadyMessage | WaitingMessage)
    )
