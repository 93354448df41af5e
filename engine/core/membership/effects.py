"""What is to be done: the effects of the membership protocol.

Rules: an effect carries the epoch that it belongs to, so that whoever has seen a higher one drops it. Each states
what shall be, not what shall change: carried out twice it does no more than once. Those of one event reach a worker
in their order. Whoever is asked again answers again, for the first answer may have been lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.core.exclusion import Verdict


@dataclass(frozen=True, slots=True)
class Effect:
    """Something to be done."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PublishEpoch(Effect):
    """Every worker learns the members, the workers that are out with this epoch, and the reason for it.

    A `planned` epoch begins at a step boundary because notice was given: no worker has failed. The plan has the owners.
    """

    members: tuple[int, ...]
    verdict: Verdict
    reason: str
    planned: bool = False


@dataclass(frozen=True, slots=True)
class GatherInventories(Effect):
    """Every member freezes and says what it holds."""


@dataclass(frozen=True, slots=True)
class PublishPlanInput(Effect):
    """The one document that every member makes the plan from; they answer with the plan's digest.

    `leaving` are the members that had given notice when the epoch was made: nobody of them becomes a shadow.
    """

    committed: int
    members: tuple[int, ...]
    leaving: tuple[int, ...]
    owners: tuple[int, ...]
    shadows: tuple[tuple[int, ...], ...]
    verdict: Verdict
    inventories: tuple[tuple[int, str], ...]


@dataclass(frozen=True, slots=True)
class StartTraining(Effect):
    """Every member runs its plan; in the first epoch, where nothing was planned, its program."""


@dataclass(frozen=True, slots=True)
class Commit(Effect):
    """`step` is committed; after it comes the next step, the end, or another epoch that everybody waits for."""

    step: int
    then: Literal["step", "end", "epoch"]


@dataclass(frozen=True, slots=True)
class OrderHandOver(Effect):
    """With the commit of `step`, `leavers` are going to hand over: whoever follows them may prepare."""

    step: int
    leavers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look(Effect):
    """The agents look at once whether somebody has died; `suspects` are the two ends of a failed transfer."""

    suspects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evict(Effect):
    """The agent of `worker` kills it."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fence(Effect):
    """`worker` is told that its words count for nothing, and the epoch that they would have to come from."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Halt(Effect):
    """The job ends without having finished."""

    committed: int
    exit_code: int
    lost_stages: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """Every step is committed, and everybody may leave; `cut_short` says why what follows the last one is not whole."""

    committed: int
    cut_short: str = ""
