"""Effects of the membership protocol: its orders to workers and agents.

Rules: an effect has the number of its epoch; a receiver that has seen a higher epoch drops it. Effects are idempotent:
they state the desired result. A worker receives the effects of one event in order. A worker that is asked again answers
again, because its first answer may have been lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.core.exclusion import Verdict
from engine.core.messages import PlanMessage


@dataclass(frozen=True, slots=True)
class Effect:
    """One effect, in the epoch that it belongs to."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PublishEpoch(Effect):
    """Tells every worker the members, the workers that are out with this epoch, and the reason for it.

    A `planned` epoch begins at a step boundary because notice was given: no worker has failed. The plan has the owners.
    """

    members: tuple[int, ...]
    verdict: Verdict
    reason: str
    planned: bool = False


@dataclass(frozen=True, slots=True)
class GatherInventories(Effect):
    """Asks every member to freeze and to report its inventory."""


@dataclass(frozen=True, slots=True)
class PublishPlanInput(Effect):
    """Sends every member the document of the plan; each answers with the digest of its plan."""

    document: PlanMessage
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class StartTraining(Effect):
    """Every member runs its plan; in the first epoch, its program."""


@dataclass(frozen=True, slots=True)
class AnnounceCommit(Effect):
    """`step` is committed; `then` the next step begins, the job ends, or all members wait for another epoch."""

    step: int
    then: Literal["step", "end", "epoch"]


@dataclass(frozen=True, slots=True)
class OrderHandOver(Effect):
    """Announces that `leavers` will hand over at the commit of `step`, so that the next epoch can be prepared."""

    step: int
    leavers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Look(Effect):
    """Asks the agents to check at once for ended workers; `suspects` are the two ends of a failed transfer."""

    suspects: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Evict(Effect):
    """The agent of `worker` kills it."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class Fence(Effect):
    """Tells `worker` that its messages are ignored, the reason, and the current epoch."""

    worker: int
    reason: str


@dataclass(frozen=True, slots=True)
class OrderRestart(Effect):
    """No step is committed: all workers are ended, and then started again, for the `number`-th time."""

    number: int
    reason: str


@dataclass(frozen=True, slots=True)
class Halt(Effect):
    """The job ends before its last step is committed."""

    committed: int
    exit_code: int
    lost_stages: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Finish(Effect):
    """Every step is committed and all workers may exit; `cut_short` is the reason if later work is incomplete."""

    committed: int
    cut_short: str = ""
