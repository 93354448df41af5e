"""The signals that the soak of ends sends to the processes of a run, and the exit codes that are right then: pure.

Rules: no signal may make a run wait for ever or change its result. A run with every step committed has finished. State
is lost only with an owner and all replicas of its stage. Without etcd a run ends with 69. A run that ends before its
first step has lost no state, and may report that.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from engine.core.errors import ExitCode

STEPS = 12
_MLP = ("--model", "mlp", "--set", "model_args.width=16", "--microbatches", "4", "--set", "microbatch_size=2")
_BASE = ("run", "--json", *_MLP, "--steps", str(STEPS), "--validate-every", "5")
_TWO = ("--pipelines", "2", "--stages", "2")
# Setting -> its arguments and its number of workers.
SETTINGS: dict[str, tuple[tuple[str, ...], int]] = {
    "lazy": (("--stages", "4"), 4),
    "eager, streams, level 2": (
        ("--stages", "4", "--redundancy", "eager", "--log-every", "1", "--set", "redundancy_level=2"),
        4,
    ),
    "none": (("--stages", "3", "--redundancy", "none"), 3),
    "lazy, two pipelines": (_TWO, 4),
    "reroute, two pipelines": ((*_TWO, "--redundancy", "reroute"), 4),
    "none, two pipelines": ((*_TWO, "--redundancy", "none"), 4),
}

SILENT_S = 4.0  # a shorter stop does not get a worker excluded
_ETCD_AWAY_S = 5.0  # after a shorter absence its calls are only late
OTHERS = ("bamboo-fork", "etcd")
NUMBERS = (signal.SIGSTOP, signal.SIGSTOP, signal.SIGKILL, signal.SIGKILL, signal.SIGTERM)


class Moment(NamedTuple):
    """A delay after the launch, after the commit of a step, or after a number of workers have finished."""

    kind: Literal["launch", "commit", "finished"]
    number: int
    delay_s: float


class Blow(NamedTuple):
    """A signal to one process; a stopped process goes on after `pause_s`, or never."""

    moment: Moment
    whom: str  # the name of a process
    number: signal.Signals
    pause_s: float | None = None

    @property
    def is_fatal(self) -> bool:
        """Whether it ends a process, or stops it for longer than the others wait."""
        still = self.number is signal.SIGSTOP and (self.pause_s is None or self.pause_s >= SILENT_S)
        return still or self.number is signal.SIGKILL


class Plan(NamedTuple):
    """The blows of one run."""

    setting: str
    blows: tuple[Blow, ...]


def arguments_of(setting: str) -> tuple[str, ...]:
    """Returns the command line of a setting."""
    return (*_BASE, *SETTINGS[setting][0])


def plan_of(seed: int) -> Plan:
    """Returns the plan of a seed; every other seed strikes only in the last two steps and while the job drains."""
    dice = random.Random(seed)  # noqa: S311 - the same seed makes the same run
    setting = list(SETTINGS)[seed // 2 % len(SETTINGS)]
    blows: list[Blow] = []
    for _ in range(dice.choice((1, 1, 2, 2, 3))):
        together = blows and dice.random() < 0.4
        moment = blows[-1].moment if together else _moment(dice, SETTINGS[setting][1], is_late=seed % 2 == 0)
        blows.append(_blow(dice, moment, SETTINGS[setting][1]))
    return Plan(setting, tuple(blows))


def _moment(dice: random.Random, num_workers: int, *, is_late: bool) -> Moment:
    if is_late and dice.random() < 0.3:
        return Moment("finished", dice.randint(1, num_workers), dice.choice((0.0, dice.random() * 0.02)))
    if not is_late and dice.random() < 0.3:
        return Moment("launch", 0, 0.2 + dice.random() * 3.0)
    step = STEPS - 1 - dice.choice((0, 0, 1, 2)) if is_late else dice.randint(0, STEPS - 4)
    return Moment("commit", step, dice.choice((0.0, dice.random() * 0.03)))


def _blow(dice: random.Random, moment: Moment, num_workers: int) -> Blow:
    whom = f"bamboo-{dice.randrange(num_workers)}" if dice.random() < 0.65 else dice.choice(OTHERS)
    number = dice.choice(NUMBERS)
    pauses = number is signal.SIGSTOP and dice.random() < 0.4
    return Blow(moment, whom, number, 0.1 + dice.random() * 1.4 if pauses else None)


def holders(events: Sequence[Mapping[str, Any]], stages: int) -> Iterator[frozenset[str]]:
    """Yields for each stage the processes that hold it, in any pipeline, by the last recorded epoch."""
    epoch = next((event for event in reversed(events) if event["event"] == "epoch"), None)
    if epoch is None:
        return
    for stage in range(stages):
        places = range(stage, len(epoch["owners"]), stages)
        held = {worker for place in places for worker in (epoch["owners"][place], *epoch["shadows"][place])}
        yield frozenset(f"bamboo-{worker}" for worker in held)


def right_codes(
    blows: Collection[Blow], *, has_begun: bool, is_committed: bool, held_by: Collection[frozenset[str]]
) -> frozenset[int]:
    """Returns the exit codes that are right after these blows have landed.

    `has_begun`: training had begun; `is_committed`: every step was committed; `held_by` names the holders of each
    stage.
    """
    codes = {int(ExitCode.OK)}
    fatal = {blow.whom for blow in blows if blow.is_fatal}
    left = {blow.whom for blow in blows if blow.number is signal.SIGTERM}
    etcd = [blow for blow in blows if blow.whom == "etcd"]
    is_away = any(blow.number is signal.SIGSTOP and (blow.pause_s or 60.0) >= _ETCD_AWAY_S for blow in etcd)
    if is_away or len(etcd) > 1:  # an etcd that ends again at once is not started a third time
        codes.add(ExitCode.COORDINATOR_UNAVAILABLE)
    if is_committed:
        return frozenset(codes)
    if has_begun:
        is_lost = any(held <= fatal | left and held & fatal for held in held_by)
        return frozenset(codes | ({ExitCode.STATE_LOST} if is_lost else set()))
    if any(whom.removeprefix("bamboo-").isdigit() for whom in fatal):
        codes.add(ExitCode.NOT_RECOVERED)
    if etcd:
        codes |= {ExitCode.ENVIRONMENT, ExitCode.COORDINATOR_UNAVAILABLE}
    return frozenset(codes)


def wrongly_out(events: Sequence[Mapping[str, Any]], blows: Collection[Blow]) -> list[str]:
    """Returns the verdicts on workers that were not struck."""
    struck = {blow.whom for blow in blows if blow.is_fatal or blow.number is signal.SIGTERM}
    verdicts = [each for event in events if event["event"] == "epoch" for each in event["verdict"]]
    return [f"worker {worker} {why}" for worker, why, *_ in verdicts if f"bamboo-{worker}" not in struck]
