"""The borders between the stages, as the coordinator learns them: what each stage returns for the border before it.

Rules: the owners try all stages at once behind the border of the first one, which is the true one before most stages of
most models. What was learnt behind another border than the true one counts for nothing: the owner hears of the true
one, and tries again. So the borders are those that the stages return one after the other.

    stage 0    its data -> A    told to all owners
    stage 1    A -> A           true, as the border before it is A
    stage 2    A -> B           true
    stage 3    A -> A           the border before it is B, which its owner is told: B -> B
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from engine.core.messages import BorderMessage, BorderSpecs


class Borders(NamedTuple):
    """The borders that are known, those behind the first stages; `learnt` has the last word about each stage."""

    known: tuple[BorderSpecs, ...] = ()
    learnt: Mapping[int, BorderMessage] = {}

    def learn(self, border: BorderMessage) -> Borders:
        """Returns the borders after a word of an owner."""
        known, learnt = self.known, {**self.learnt, border.stage: border}
        while (following := learnt.get(len(known))) is not None and following.before == known[-1:]:
            known = (*known, following.behind)
        return Borders(known, learnt)
