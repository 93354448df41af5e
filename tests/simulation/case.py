"""Cases of the simulation: a small job, and the faults that strike it; as JSON, so that every case can be replayed.

Rules: the same case gives the same history. A fault strikes a worker at one of the worker's own moments: the `at`-th
time that it reaches `point`. `moment` counts all points of a worker: before and after each action,
and each phase of a recovery.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from engine.core.ownership import Redundancy, directions_of

# Points of a worker. Each in the last line is before the named action; `replayed` is before any action of a plan.
POINTS = (
    *(
        "moment",
        "welcome",
        "partition",
        "ready",
        "fence",
        "inventory",
        "inventoried",
        "plan",
        "planned",
        "go",
        "replayed",
    ),
    *("commit", "stepped", "decided"),
    *("HEAL", "REDUCE_GRAD", "LOG", "COMMIT", "F", "B", "f", "I", "W", "STREAM"),
)
HOST_KINDS = ("power", "agent", "silent")  # of the loss of a host, as the fault of a worker: of its host
KINDS = ("kill", "zombie", "pause", "link", "suspect", "notice", "stop")
PREDICTED = "last stage has all outputs"
SHORT = "short"  # a notice that does not suffice for a step boundary; the worker is killed after it
SHORT_US = 100_000
_SILENCES = ("silent", "silent there", "silent back", "middle")
MOVE = "move"  # other owners are wanted, drawn from `length`
USE = "use"  # another schedule is wanted, drawn from `length`
CRAMP = "cramp"  # others of the waiting workers have too little memory, drawn from `length`
LINK_KINDS = (*_SILENCES, "link", "network", "late", "duplicated", "flap")
FOR_EVER_US = 600_000_000  # of a fault of links without an end
HEALS_IN_TIME_US = 1_000_000  # half the time after which an edge is dark


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault of `worker` at the `at`-th time that it reaches `point`, counted from 1.

    `length` is in microseconds: how long a zombie goes on, how long a pause or a broken link lasts.
    """

    worker: int
    point: str
    at: int = 1
    kind: str = "kill"
    length: int = 0

    @property
    def hinders(self) -> bool:
        """Whether it is a fault of links for which one of their ends may be given up."""
        return self.kind in ("link", "network") or (self.kind in _SILENCES and self.length > HEALS_IN_TIME_US)


@dataclass(frozen=True, slots=True)
class HostLoss:
    """The loss of a host at the `at`-th moment of the coordinators of a history.

    `which` is the host that coordinates, or is about to, for 0, else one of the others. `kind`: its power goes, its
    agent is killed, or it is silent until its lease expires.
    """

    at: int
    which: int = 0
    kind: str = "power"


@dataclass(frozen=True, slots=True)
class Sleep:
    """The stop of a coordinator at the `at`-th of its moments, for `length` microseconds.

    `kind`: its agent stops with it, all processes do, or it alone does. One that stops alone is killed after ten
    seconds, and after another fifteen if the one that waits has stopped too, which `is_double` says.
    """

    at: int
    length: int
    kind: str = "agent"
    is_double: bool = False


@dataclass(frozen=True, slots=True)
class Case:
    """One job and its faults. With `spread` 0 all delays are usual; above 0 they are drawn from the seed.

    With more than one of `blocks` in a stage of the job, `stages` counts blocks; with more than one of `slices` in a
    microbatch, `microbatches` counts slices.
    """

    stages: int = 4
    microbatches: int = 4
    pipelines: int = 1
    redundancy: Redundancy = "lazy"
    level: int = 1
    schedule: str = "1f1b"
    stages_per_worker: int = 1
    blocks: int = 1
    slices: int = 1
    fsdp: int = 0
    ties: tuple[tuple[int, ...], ...] = ()
    log_every: int = 0
    residuals: str = "recompute"
    copy_time: float = 0.0  # of a residual to the host, in forwards; 0: none leaves
    validate_every: int = 0
    early_stop: bool = False  # after the second validation: none is better than the first
    predicts: bool = False  # only forwards run, once, before the first step
    keep_every: int = 0  # steps; 0 keeps the last one
    steps: int = 3
    seed: int = 0
    spread: int = 0
    faults: tuple[Fault, ...] = ()
    deaths: tuple[int, ...] = ()  # of coordinators, each at one of its moments
    waiting: int = 0  # workers, with the numbers behind those of the first members
    elastic: bool = False  # the host asks the policy for wanted owners
    again: int = 0  # each such word of a worker, about, comes a second time, and late; 0 for none
    joining: int = 0  # the last of them, which join without a failure
    most_workers: int = 0  # that train at the same time; 0 without a limit
    hosts: int = 0  # each with an agent of its own, of which another one coordinates when one is lost; 0 for one host
    losses: tuple[HostLoss, ...] = ()
    sleeps: tuple[Sleep, ...] = ()  # of coordinators; actions are slow then, and the clock ticks all the time

    @property
    def num_workers(self) -> int:
        """The number of workers before any failure."""
        pipelines = self.pipelines // directions_of(self.schedule)
        return self.stages // self.blocks // self.stages_per_worker * pipelines

    @property
    def planned_steps(self) -> int:
        """The number of steps that are committed if nobody stops the job: one follows the last validation."""
        if self.predicts:
            return 0
        last = 2 * self.validate_every
        return last + 1 if self.early_stop and 0 < last < self.steps - 1 else self.steps

    @property
    def loses_a_host(self) -> bool:
        """Whether a whole host is lost; then each worker has a host of its own, else two have one."""
        return any(fault.kind == "zombie" for fault in self.faults)

    def text(self) -> str:
        """Returns the case as one line of JSON, without default values."""
        usual = asdict(Case())
        return json.dumps({name: value for name, value in asdict(self).items() if value != usual[name]})


def from_text(text: str) -> Case:
    """Returns the case in a text."""
    fields: dict[str, Any] = json.loads(text)
    fields["faults"] = tuple(Fault(**each) for each in fields.get("faults", ()))
    fields["losses"] = tuple(HostLoss(**each) for each in fields.get("losses", ()))
    fields["sleeps"] = tuple(Sleep(**each) for each in fields.get("sleeps", ()))
    fields["deaths"] = tuple(fields.get("deaths", ()))
    fields["ties"] = tuple(tuple(group) for group in fields.get("ties", ()))
    return Case(**fields)


class Violation(Exception):
    """A promise was broken."""
