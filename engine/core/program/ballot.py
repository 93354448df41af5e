"""The commit of a step: it comes when every replica has voted, and carries the loss and the clip factor.

A vote says that one replica of a slot holds the inputs of its optimizer step. So the step can be finished after any
later death. Owners vote with norms and loss. Norms are summed in layer order and losses in pipeline order, so that the
result does not depend on the order of the votes.

    owner    LOG  --------->  COMMIT (vote, norms, loss)  -> commit: loss, clip factor  ->  STEP
    shadow        -> LOG  ->  COMMIT (vote)               ->                            ->  STEP
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from engine.core.errors import ensure, required
from engine.core.message_kinds import ToAgent, message
from engine.core.ownership import Ownership, Slot

# Votes for the commit of a step: one message of each worker, with the votes of all its replicas.
#
# The COMMITs of a worker follow its last LOG in every program, and only STEP needs a vote. So one message goes with the
# last COMMIT: no other worker waits for it sooner. Only the marks of very many microbatches need a second one. The
# measured times and sizes in a vote decide nothing about the step; the policy uses them later.


@dataclass(frozen=True, slots=True)
class SlotVote:
    """A replica holds all that its optimizer step reads; an owner adds norms, the owner of a last stage the loss."""

    pipeline: int
    stage: int
    layers: tuple[int, ...] = ()
    squared_norms: tuple[float, ...] = ()  # of the gradients of these layers
    loss: float | None = None
    loaded: tuple[int, ...] = ()  # microbatches, in a step with an audit
    marks: tuple[str, ...] = ()  # of these microbatches
    took_ns: tuple[int, ...] = ()  # of an owner: its forwards and backwards, 0 unless it ran those of all microbatches
    sizes: tuple[int, ...] = ()  # the `StageBytes` of an owned slot, in the first steps of a program
    lr: float | None = None  # of this step, with the loss, if the schedule is not bamboo's and follows the step alone
    passed_ns: tuple[tuple[int, ...], ...] = ()  # of an owner whose job adapts its schedule: as `BORDER_OPS`
    heal_ns: int = 0  # of a new shadow: from the first word of its owner to the whole replica


@message
class VoteMessage(ToAgent):
    """All replicas of a worker are ready for the optimizer, or some of them if one message cannot have all votes."""

    epoch: int
    step: int
    slots: tuple[SlotVote, ...]


NO_NORM = -1.0  # stands for a norm that is not finite, which JSON has not
SKIP = 0.0  # a clip factor: the step is skipped; no finite norm has it
Voter = tuple[int, Slot]  # worker and slot

# Votes of workers, of which one is added at a fixed cost: those before, a worker, its votes.
VoteChain = tuple[Any, int, tuple[SlotVote, ...]] | None


def in_order(chain: VoteChain) -> Iterator[tuple[int, tuple[SlotVote, ...]]]:
    """Returns each worker with the votes of a message, in the order in which they came."""
    votes = []
    while chain is not None:
        chain, worker, slots = chain
        votes.append((worker, slots))
    return reversed(votes)


class Commit(NamedTuple):
    """The mean loss over pipelines, the global gradient norm, and the factor that clips it, or `SKIP`."""

    step: int
    loss: float
    grad_norm: float
    clip_factor: float
    lr: float | None = None  # unless the job alone tells it
    monitored: float | None = None  # the last value of the figure that a schedule follows


class Ballot(NamedTuple):
    """The votes for one step in one epoch, of owners and wanted shadows; a shadow that heals in this step votes too."""

    epoch: int
    step: int
    ownership: Ownership
    clip_norm: float
    most_missing: int  # voters; fewer if votes came twice
    cast: VoteChain = None

    @property
    def votes(self) -> dict[Voter, SlotVote]:
        """The votes so far, of those that came twice the last."""
        return {(worker, (each.pipeline, each.stage)): each for worker, slots in in_order(self.cast) for each in slots}

    @property
    def missing(self) -> frozenset[Voter]:
        """The replicas that have not voted."""
        return _voters(self.ownership).difference(self.votes)

    def add(self, worker: int, vote: VoteMessage) -> tuple[Ballot, Commit | None]:
        """Returns the ballot with a worker's votes, and the commit if none is missing; another epoch's are ignored."""
        if vote.epoch != self.epoch:
            return self, None
        ensure(vote.step == self.step, f"vote for step {vote.step} while step {self.step} is open")
        for place in ((each.pipeline, each.stage) for each in vote.slots):
            ensure(worker in self.ownership.replicas(*place), f"worker {worker} has no replica of {place}")
        most = self.most_missing - len(vote.slots)
        new = self._replace(most_missing=most, cast=(self.cast, worker, vote.slots))
        if most > 0:
            return new, None
        missing = len(new.missing)
        return new._replace(most_missing=missing), None if missing else _commit(new)


def layer_norms(ballot: Ballot) -> tuple[tuple[int, float], ...]:
    """Returns each layer's gradient norm before clipping; a tied parameter counts in its first layer only.

    Where a gradient is not finite, the norm is infinite or NaN.
    """
    owner = ballot.ownership.owner
    votes = [vote for (worker, slot), vote in ballot.votes.items() if slot[0] == 0 and worker == owner(*slot)]
    squares = sorted(pair for vote in votes for pair in zip(vote.layers, vote.squared_norms, strict=True))
    return tuple((layer, math.sqrt(square) if square >= 0 else math.nan) for layer, square in squares)


def open_ballot(epoch: int, step: int, ownership: Ownership, clip_norm: float) -> Ballot:
    """Returns the ballot for a step, without a vote."""
    return Ballot(epoch, step, ownership, clip_norm, len(_voters(ownership)))


@lru_cache(maxsize=256)
def _voters(ownership: Ownership) -> frozenset[Voter]:
    return frozenset((worker, slot) for slot in ownership.grid.slots() for worker in ownership.replicas(*slot))


def _commit(ballot: Ballot) -> Commit:
    ownership, votes = ballot.ownership, ballot.votes
    grid = ownership.grid

    def of_owner(pipeline: int, stage: int) -> SlotVote:
        return votes[ownership.owner(pipeline, stage), (pipeline, stage)]

    total = 0.0
    for pipeline in range(grid.pipelines):
        total += required(of_owner(pipeline, grid.stages - 1).loss, "the last stage votes with its loss")
    squared = 0.0
    for stage in range(grid.stages):
        vote = of_owner(0, stage)
        for _, norm in sorted(zip(vote.layers, vote.squared_norms, strict=True)):
            squared += norm
    norm = math.sqrt(squared) if squared >= 0 else math.nan
    lr = of_owner(0, grid.stages - 1).lr
    return Commit(ballot.step, total / grid.pipelines, norm, clip_factor(norm, ballot.clip_norm), lr)


def clip_factor(norm: float, clip_norm: float) -> float:
    """Returns the factor of the gradients that keeps their global norm to at most `clip_norm` (0 = no limit)."""
    if clip_norm == 0 or not norm > clip_norm:
        return 1.0
    return clip_norm / norm
