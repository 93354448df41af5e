"""The commit of a step: when every slot has voted, and what everybody learns with it.

A vote says that the owner of a slot holds all that its optimizer step will read. Norms are summed in layer order and
losses in pipeline order, so that the outcome does not depend on who voted first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Vote:
    """One slot's word: squared gradient norm of each of its layers, and the training loss if it is the last stage."""

    step: int
    pipeline: int
    stage: int
    squared_norms: Mapping[int, float]
    loss: float | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """What everybody learns: mean loss over pipelines, global gradient norm, and the factor that clips it."""

    step: int
    loss: float
    grad_norm: float
    clip_factor: float


@dataclass(slots=True)
class Ballot:
    """The votes of the step that is open. Pure: no clock, no I/O; votes for another step are refused."""

    num_pipelines: int
    num_stages: int
    clip_norm: float
    step: int = 0
    votes: dict[tuple[int, int], Vote] = field(default_factory=dict)

    def add(self, vote: Vote) -> Commit | None:
        """Takes a vote; returns the commit when it was the last one missing, and opens the next step."""
        assert vote.step == self.step, f"vote for step {vote.step} while step {self.step} is open"
        self.votes[vote.pipeline, vote.stage] = vote
        if len(self.votes) < self.num_pipelines * self.num_stages:
            return None
        commit = self._commit()
        self.step += 1
        self.votes = {}
        return commit

    def _commit(self) -> Commit:
        losses = [self.votes[pipeline, self.num_stages - 1].loss for pipeline in range(self.num_pipelines)]
        total = 0.0
        for loss in losses:
            assert loss is not None, "the last stage votes with its loss"
            total += loss
        squared = 0.0
        for stage in range(self.num_stages):
            norms = self.votes[0, stage].squared_norms
            for layer in sorted(norms):
                squared += norms[layer]
        norm = math.sqrt(squared) if squared >= 0 else math.nan
        return Commit(self.step, total / self.num_pipelines, norm, clip_factor(norm, self.clip_norm))


def clip_factor(norm: float, clip_norm: float) -> float:
    """Returns what gradients are multiplied with so that their global norm is at most `clip_norm` (0 = no limit)."""
    if clip_norm == 0 or not norm > clip_norm:
        return 1.0
    return clip_norm / norm
