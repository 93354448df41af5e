"""Faults in a job of another launcher: their moments and victims in the job's own terms, and when a moment has come.

Rules: a rank is a process of the job with a number of its own; the victim of a fault is the newest process of a rank at
the moment of the strike. A step counts when a rank reports that it has ended it. Each fault strikes once. What can
never strike is refused before the start.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from engine.core.errors import Problem, nearest
from engine.core.faults.launchers import Launcher
from engine.core.faults.scenario import Limits
from engine.core.texts import numbered, pattern_error
from engine.core.units import Scalar, described, duration_text

During = Literal["checkpoint", "restart"]
ExternalOutcome = Literal["recovered", "failed"]
# still: the survivors stand still. notice: the launcher notices. end: the last rank ends. begin: the last one begins.
EXTERNAL_PHASES = ("still", "notice", "end", "begin", "step")
KINDS = ("kill", "terminate", "stop", "pause", "slow", "disk-full", "oom", "cut")
BEYOND_SIGNALS = ("disk-full", "oom", "cut")
ANY_RANK = -1  # of a line that names no rank: it counts for all of them


@dataclass(frozen=True, slots=True)
class ExternalMoment:
    """A moment of the job: one of `step`, `progress`, `after_ns` and `during`, and `delay_ns` since."""

    step: int | None = described(None, "the step that a rank has reported")
    rank: int | None = described(None, "the rank that must have reported it (default: the first one that does)")
    progress: str | None = described(None, "the part of `steps` that has been trained, such as 50%")
    after_ns: int | None = described(None, "the time since the command was started")
    during: During | None = described(
        None, "checkpoint: a file of `checkpoint` is being written; restart: the victim has started again"
    )
    delay_ns: int = described(0, "the time that must have passed since")

    def in_words(self) -> str:
        """Returns the moment in words."""
        delay = f"{duration_text(self.delay_ns)} after: " if self.delay_ns else ""
        if self.step is not None:
            return f"{delay}at step {self.step}" + ("" if self.rank is None else f" of rank {self.rank}")
        if self.progress is not None:
            return f"{delay}at {self.progress} of the steps"
        if self.after_ns is not None:
            return f"{delay}{duration_text(self.after_ns)} after the start"
        return f"{delay}during the {'next ' * (self.during == 'restart')}{self.during}"


@dataclass(frozen=True, slots=True)
class ExternalTarget:
    """The victims: a `rank`, `ranks` or a `group`, the `launcher`, or with `child` the children of the ranks."""

    rank: int | None = described(None, "a rank by its number")
    ranks: tuple[int, ...] = described((), "several ranks, struck at the same moment")
    group: int | None = described(
        None, "all ranks of a group by its number: an agent of torchrun, a replica group of torchft, a node of Slurm"
    )
    launcher: bool = described(False, "the process that has started the ranks")
    child: str | None = described(None, "a regular expression: the child of the rank whose command matches")

    @property
    def numbers(self) -> tuple[int, ...]:
        """The ranks that are struck, or whose children are."""
        return self.ranks if self.rank is None else (self.rank, *self.ranks)

    def in_words(self) -> str:
        """Returns the victims in words."""
        if self.launcher:
            return "the launcher"
        ranks = numbered("rank", self.numbers) if self.group is None else f"the ranks of group {self.group}"
        return ranks if self.child is None else f"the child {self.child!r} of {ranks}"


@dataclass(frozen=True, slots=True)
class ExternalFault:
    """One fault; `parameters` are those of its kind, by `Parameter.key`."""

    id: str
    moment: ExternalMoment
    target: ExternalTarget
    do: str
    parameters: Mapping[str, Scalar] = field(default_factory=dict, hash=False)

    def in_words(self) -> str:
        """Returns the fault in words."""
        whom = str(self.parameters.get("path")) if self.do == "disk-full" else self.target.in_words()
        return f"{self.do} {whom} {self.moment.in_words()}"


@dataclass(frozen=True, slots=True)
class ExternalExpect:
    """The expected results of a job of another launcher; None means unchecked."""

    outcome: ExternalOutcome = described(
        "recovered", "recovered: the job keeps training after the faults and exits with 0; failed: it does not"
    )
    trajectory: Literal["identical"] | None = described(
        None, "the reported hashes of the state are those of the same command without faults"
    )
    tolerance: float | None = described(None, "the relative difference of losses and tensors that trajectory allows")
    samples: Literal["exactly-once"] | None = described(None, "the steps count the samples that those of the twin do")
    steps_lost: int | None = described(None, "steps that were reported before a fault and are done again, at most")
    culprit: Literal["exact"] | None = described(None, "exact: the launcher blames the struck ranks, and no others")
    leftovers: Literal["none"] | None = described(None, "no process of the job is left when its command has ended")
    recovery: Limits | None = described(None, "limits on the time that training stalled")

    @property
    def needs_twin(self) -> bool:
        """Whether the command must also run without faults."""
        return self.trajectory is not None or self.samples is not None


@dataclass(frozen=True, slots=True)
class ExternalProgress:
    """Where steps are read if no process calls `bamboo.progress`; `{folder}` is that of the job in the run folder."""

    output: str = described("", "a regular expression with the group step, for lines of the output")
    jsonl: str = described("", "a file with a JSON object for each step")
    tensorboard: str = described("", "a folder with event files of TensorBoard")


@dataclass(frozen=True, slots=True)
class ExternalScenario:
    """One scenario for a job of another launcher, as read from its file and completed by the command line."""

    name: str
    about: str
    command: tuple[str, ...]
    launcher: Launcher
    faults: tuple[ExternalFault, ...]
    expect: ExternalExpect = ExternalExpect()
    progress: ExternalProgress = ExternalProgress()
    steps: int | None = None
    checkpoint: str = ""  # a pattern of paths
    timeout_ns: int = 600 * 10**9


# Refusals before the start.


def external_problems(scenario: ExternalScenario, num_ranks: int | None, *, is_attached: bool) -> Iterator[Problem]:
    """Yields what makes a scenario impossible for so many ranks, if known; the job runs already if `is_attached`."""
    if pattern := scenario.progress.output:
        wrong = pattern_error(pattern)
        if wrong or "step" not in re.compile(pattern).groupindex:
            yield Problem("progress.output", "a regular expression with a group (?P<step>...)", repr(pattern), wrong)
        elif is_attached:
            yield Problem("progress.output", "another source", "--attach", "the output of a running job is not read")
    if is_attached and scenario.expect.needs_twin:
        hint = "a job that runs already has no twin"
        yield Problem("expect", "neither trajectory nor samples", "--attach", hint)
    if scenario.expect.culprit and not scenario.launcher.blame:
        hint = "how it reports a failure is not known"
        yield Problem("expect.culprit", "a launcher that blames ranks", scenario.launcher.name, hint)
    for number, fault in enumerate(scenario.faults):
        yield from _fault_problems(f"faults.{number}", fault, scenario, num_ranks)


def _fault_problems(
    at: str, fault: ExternalFault, scenario: ExternalScenario, num_ranks: int | None
) -> Iterator[Problem]:
    moment, target, launcher = fault.moment, fault.target, scenario.launcher
    named = {**{f"{at}.target": rank for rank in target.numbers if rank != moment.rank}, f"{at}.at.rank": moment.rank}
    if num_ranks is not None:
        for place, rank in named.items():
            if rank is not None and rank >= num_ranks:
                yield Problem(place, f"a rank below {num_ranks}", str(rank), f"the command starts {num_ranks}")
    yield from _target_problems(at, fault, launcher)
    if moment.rank is not None and moment.step is None:
        yield Problem(f"{at}.at.rank", "a step with it", "none", "the rank is the one that reports the step")
    if moment.progress is not None and part_of(moment.progress) is None:
        yield Problem(f"{at}.at.progress", "a part such as 50%", repr(moment.progress))
    elif moment.progress is not None and scenario.steps is None:
        yield Problem("steps", "the steps of the job", "nothing", f"{fault.id} strikes {moment.in_words()}")
    if moment.during == "checkpoint" and not scenario.checkpoint:
        hint = f"{fault.id} strikes while one of these files is written"
        yield Problem("checkpoint", "a pattern of files such as out/*.pt", "nothing", hint)
    is_first = fault is scenario.faults[0]
    if moment.during == "restart" and (is_first or not target.numbers):
        yield Problem(
            f"{at}.at.during", "a rank, and a fault before", "none", "another fault must make the rank start again"
        )


def _target_problems(at: str, fault: ExternalFault, launcher: Launcher) -> Iterator[Problem]:
    target = fault.target
    if fault.do == "disk-full" and (target.numbers or target.group is not None or target.launcher):
        yield Problem(f"{at}.target", "no target", target.in_words(), "a disk is full for all processes")
    elif fault.do == "cut" and (len(set(target.numbers)) != 2 or target.child is not None or target.group is not None):
        yield Problem(f"{at}.target", "two ranks such as ranks: [0, 1]", target.in_words(), "their connections are cut")
    elif target.group is not None and target.numbers:
        yield Problem(f"{at}.target", "a group alone", "ranks with it", "all its ranks are struck")
    elif not target.numbers and target.group is None and not target.launcher and fault.do != "disk-full":
        yield Problem(f"{at}.target", "a rank, ranks, a group or launcher: true", "none of them", "name the victim")
    if target.launcher and (target.numbers or target.group is not None or target.child is not None):
        yield Problem(f"{at}.target", "the launcher alone", "ranks with it", "a child is that of a rank")
    if target.launcher and not launcher.has_launcher:
        yield Problem(f"{at}.target.launcher", "a rank", "launcher", f"{launcher.name} has no process above its ranks")
    if target.child is not None and (wrong := pattern_error(target.child)):
        yield Problem(f"{at}.target.child", "a regular expression", repr(target.child), wrong)


_NO_DELAY = "that takes a network of the job alone: run it in a container, and delay its interface with tc netem"
_REFUSED = {
    "cut-link": "cut destroys the TCP connections between two ranks",
    **dict.fromkeys(("delay", "delay-link"), _NO_DELAY),
}


def refused_kind(do: str) -> str:
    """Returns why a kind strikes no job of another launcher, or the nearest one that does."""
    return _REFUSED.get(do) or nearest(do, KINDS) or "a job of another launcher is struck from outside only"


def part_of(text: str) -> float | None:
    """Returns the part that a percentage spells; None if it is none from 0% to 100%."""
    match = re.fullmatch(r"([0-9]{1,3}(?:\.[0-9]{1,3})?)\s?%", text)
    return float(match[1]) / 100 if match and float(match[1]) <= 100 else None


# Moments as they come.


@dataclass(slots=True)
class JobView:
    """The present state of the job: its start, the newest step of each rank, and what goes on.

    `restarted` are the ranks that have started again and reported no step since; `is_writing`: a checkpoint changes.
    """

    started_ns: int
    steps: dict[int, int] = field(default_factory=dict)
    restarted: frozenset[int] = frozenset()
    is_writing: bool = False

    def newest(self, rank: int | None) -> int:
        """Returns the newest step of a rank, or of any; -1 if there is none."""
        if rank is None:
            return max(self.steps.values(), default=-1)
        return max(self.steps.get(rank, -1), self.steps.get(ANY_RANK, -1))


@dataclass(slots=True)
class PendingFaults:
    """The faults that have not struck yet, and since when the moment of each has come."""

    scenario: ExternalScenario
    left: list[ExternalFault]
    came_ns: dict[str, int] = field(default_factory=dict)
    num_struck: int = 0

    def due(self, view: JobView, now_ns: int) -> list[ExternalFault]:
        """Returns the faults to strike now, each once."""
        for fault in self.left:
            if fault.id not in self.came_ns and self._has_come(fault, view, now_ns):
                self.came_ns[fault.id] = now_ns
        strikes = [each for each in self.left if now_ns >= self.came_ns.get(each.id, 1 << 63) + each.moment.delay_ns]
        self.left = [each for each in self.left if each not in strikes]
        self.num_struck += len(strikes)
        return strikes

    def _has_come(self, fault: ExternalFault, view: JobView, now_ns: int) -> bool:
        moment = fault.moment
        if moment.step is not None:
            return view.newest(moment.rank) >= moment.step
        if moment.progress is not None:
            part = part_of(moment.progress) or 0.0
            return view.newest(None) + 1 >= math.ceil(part * (self.scenario.steps or 0))
        if moment.after_ns is not None:
            return now_ns - view.started_ns >= moment.after_ns
        if moment.during == "checkpoint":
            return view.is_writing
        return self.num_struck > 0 and bool(view.restarted.intersection(fault.target.numbers))


def least_wait_ns(pending: Sequence[ExternalFault], came_ns: Mapping[str, int], now_ns: int) -> int | None:
    """Returns the time until the next fault whose moment has come is due; None without one."""
    waits = [came_ns[each.id] + each.moment.delay_ns - now_ns for each in pending if each.id in came_ns]
    return max(0, min(waits)) if waits else None
