"""The commit of a step: it comes when every replica has voted, and carries the loss and the clip factor.

A vote says that one replica of a slot holds the inputs of its optimizer step. So the step can be finished after any
later death. Owners vote with norms and loss. Norms are summed in layer order and losses in pipeline order, so that the
result does not depend on the order of the votes.

    owner    LOG  --------->  COMMIT (vote, norms, loss)  -> commit: loss, clip factor  ->  STEP
    shadow        -> LOG  ->  COMMIT (vote)               ->                            ->  STEP
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from engine.core.errors import ensure, required
from engine.core.ownership import Ownership, Slot
from engine.core.recovery.vote import SlotVote, VoteMessage

NO_NORM = -1.0  # stands for a norm that is not finite, which JSON has not
SKIP = 0.0  # a clip factor: the step is skipped; no finite norm has it
Voter = tuple[int, Slot]  # worker and slot


class Commit(NamedTuple):
    """The mean loss over pipelines, the global gradient norm, and the factor that clips it, or `SKIP`."""

    step: int
    loss: float
    grad_norm: float
    clip_factor: float


class Ballot(NamedTuple):
    """The votes for one step by the replicas of one ownership, in one epoch; `open_ballot` makes it."""

    epoch: int
    step: int
    ownership: Ownership
    clip_norm: float
    missing: frozenset[Voter]
    votes: Mapping[Voter, SlotVote]

    def add(self, worker: int, vote: VoteMessage) -> tuple[Ballot, Commit | None]:
        """Returns the ballot with a worker's votes, and the commit if no other one is missing.

        A vote of another epoch is ignored: its voter has been frozen since, or soon will be.
        """
        if vote.epoch != self.epoch:
            return self, None
        ensure(vote.step == self.step, f"vote for step {vote.step} while step {self.step} is open")
        cast = {(worker, (each.pipeline, each.stage)): each for each in vote.slots}
        for _, slot in cast:
            ensure(worker in self.ownership.replicas(*slot), f"worker {worker} has no replica of {slot}")
        new = self._replace(votes={**self.votes, **cast}, missing=self.missing.difference(cast))
        return new, None if new.missing else _commit(new)


def open_ballot(epoch: int, step: int, ownership: Ownership, clip_norm: float) -> Ballot:
    """Returns the ballot for a step, without a vote."""
    return Ballot(epoch, step, ownership, clip_norm, _voters(ownership), {})


@lru_cache(maxsize=256)
def _voters(ownership: Ownership) -> frozenset[Voter]:
    return frozenset((worker, slot) for slot in ownership.grid.slots() for worker in ownership.replicas(*slot))


def _commit(ballot: Ballot) -> Commit:
    ownership = ballot.ownership
    grid = ownership.grid

    def of_owner(pipeline: int, stage: int) -> SlotVote:
        return ballot.votes[ownership.owner(pipeline, stage), (pipeline, stage)]

    total = 0.0
    for pipeline in range(grid.pipelines):
        total += required(of_owner(pipeline, grid.stages - 1).loss, "the last stage votes with its loss")
    squared = 0.0
    for stage in range(grid.stages):
        vote = of_owner(0, stage)
        for _, norm in sorted(zip(vote.layers, vote.squared_norms, strict=True)):
            squared += norm
    norm = math.sqrt(squared) if squared >= 0 else math.nan
    return Commit(ballot.step, total / grid.pipelines, norm, clip_factor(norm, ballot.clip_norm))


def clip_factor(norm: float, clip_norm: float) -> float:
    """Returns the factor of the gradients that keeps their global norm to at most `clip_norm` (0 = no limit)."""
    if clip_norm == 0 or not norm > clip_norm:
        return 1.0
    return clip_norm / norm
