"""The commit of a step: it comes when every replica has voted, and carries the loss and the clip factor.

A vote says that one replica of a slot holds the inputs of its optimizer step. So the step can be finished after any
later death. Owners vote with norms and loss. Norms are summed in layer order and losses in pipeline order, so that the
result does not depend on the order of the votes.

    owner    LOG  --------->  COMMIT (vote, norms, loss)  -> commit: loss, clip factor  ->  STEP
    shadow        -> LOG  ->  COMMIT (vote)               ->                            ->  STEP
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from engine.core.errors import ensure, required
from engine.core.messages import VoteMessage
from engine.core.ownership import Ownership, Slot


@dataclass(frozen=True, slots=True)
class Commit:
    """The mean loss over pipelines, the global gradient norm, and the factor that clips it."""

    step: int
    loss: float
    grad_norm: float
    clip_factor: float


@dataclass(slots=True)
class Ballot:
    """The votes for one step by the replicas of one ownership, in one epoch. Pure: no clock, no I/O."""

    epoch: int
    step: int
    ownership: Ownership
    clip_norm: float
    votes: dict[tuple[int, Slot], VoteMessage] = field(default_factory=dict)
    missing: set[tuple[int, Slot]] = field(init=False)  # votes, as (worker, slot)

    def __post_init__(self) -> None:
        slots = self.ownership.grid.slots()
        self.missing = {(worker, slot) for slot in slots for worker in self.ownership.replicas(*slot)}

    def add(self, worker: int, vote: VoteMessage) -> Commit | None:
        """Takes a worker's vote; returns the commit if it was the last one missing.

        A vote of another epoch is ignored: its voter has been frozen since, or soon will be.
        """
        slot = (vote.pipeline, vote.stage)
        if vote.epoch != self.epoch:
            return None
        ensure(vote.step == self.step, f"vote for step {vote.step} while step {self.step} is open")
        ensure(worker in self.ownership.replicas(*slot), f"worker {worker} has no replica of {slot}")
        self.votes[worker, slot] = vote
        self.missing.discard((worker, slot))
        return None if self.missing else self._commit()

    def _of_owner(self, pipeline: int, stage: int) -> VoteMessage:
        return self.votes[self.ownership.owner(pipeline, stage), (pipeline, stage)]

    def _commit(self) -> Commit:
        grid = self.ownership.grid
        total = 0.0
        for pipeline in range(grid.pipelines):
            loss = self._of_owner(pipeline, grid.stages - 1).loss
            total += required(loss, "the last stage votes with its loss")
        squared = 0.0
        for stage in range(grid.stages):
            vote = self._of_owner(0, stage)
            for _, norm in sorted(zip(vote.layers, vote.squared_norms, strict=True)):
                squared += norm
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        return Commit(self.step, total / grid.pipelines, norm, clip_factor(norm, self.clip_norm))


def clip_factor(norm: float, clip_norm: float) -> float:
    """Returns the factor of the gradients that keeps their global norm to at most `clip_norm` (0 = no limit)."""
    if clip_norm == 0 or not norm > clip_norm:
        return 1.0
    return clip_norm / norm
