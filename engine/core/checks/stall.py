"""The time that training stood because of a failure: the gap between the commits around it, less a usual step.

Rules:
- Times are nanoseconds. A usual step is the median of the last few steps under the same owners. The first step of a
  run, which warms up, and the first step after a recovery, which restores shadows, are not usual.
- If no slot has changed its owner, the steps after the recovery are usual as well: they count if none before does. So a
  worker that leaves after its hand-over has a stall, although only one step lies between the two.
- The time is a range, not a figure, if there is no usual step or if no commit has followed; the whole gap is the most.
- It is never less than the time without any finished action, because the rest of the gap holds one step. So it is more
  than 0 even if the whole gap is shorter than a usual step, which a busy machine may have made long.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

USUAL = 10  # steps whose median is the usual length


@dataclass(frozen=True, slots=True)
class Stall:
    """The time that training stood; the two are equal if it is known, and `most_ns` is None without a commit."""

    least_ns: int
    most_ns: int | None

    @property
    def bound(self) -> str:
        """``at least`` if only bounds are known, else an empty text."""
        return "" if self.most_ns == self.least_ns else "at least"

    def __str__(self) -> str:
        if not self.bound:
            return _text(self.least_ns)
        return f"at least {_text(self.least_ns)}" + ("" if self.most_ns is None else f", at most {_text(self.most_ns)}")


@dataclass(slots=True)
class StepLengths:
    """The begin of the open step, and the lengths of the last usual steps, from the commits of a run."""

    since_ns: int | None = None  # the last commit, or the begin of training
    usual: deque[int] = field(default_factory=lambda: deque(maxlen=USUAL))
    _is_usual: bool = False  # the open step

    def begin(self, at_ns: int) -> None:
        """Notes that training goes on; the first time, training begins."""
        self.since_ns = at_ns if self.since_ns is None else self.since_ns

    def commit(self, at_ns: int, recovered: bool) -> None:
        """Notes a commit; `recovered` if it ended a recovery."""
        if recovered:
            self.usual.clear()
        elif self._is_usual and self.since_ns is not None:
            self.usual.append(at_ns - self.since_ns)
        self.since_ns, self._is_usual = at_ns, not recovered

    def lose_track(self) -> None:
        """Notes that commits before the next one are not known: no step ends with it."""
        self.since_ns, self._is_usual = None, False

    def stall(self, resume_ns: int | None, latest_ns: int, idle_ns: int) -> Stall:
        """Returns the stall in the open step, before its commit is noted.

        `resume_ns` is that commit, if there is one; `latest_ns` is the last known time before it, and `idle_ns` a time
        in it in which no worker finished an action.
        """
        until_ns = latest_ns if resume_ns is None else resume_ns
        gap_ns = None if self.since_ns is None else until_ns - self.since_ns
        if gap_ns is None or not self.usual:
            return Stall(max(0, idle_ns), None if resume_ns is None else gap_ns)
        known_ns = max(0, idle_ns, gap_ns - int(median(self.usual)))
        return Stall(known_ns, None if resume_ns is None else known_ns)


def with_later_steps(stall: Stall, commits_ns: Sequence[int]) -> Stall:
    """Returns a stall of which only bounds are known, by the steps after it: from the commit that ended it on."""
    usual_ns = [later - earlier for earlier, later in pairwise(commits_ns[1 : USUAL + 2])]
    if stall.most_ns is None or not usual_ns:
        return stall
    known_ns = max(stall.least_ns, stall.most_ns - int(median(usual_ns)))
    return Stall(known_ns, known_ns)


def quantile(stalls: Sequence[Stall], part: float) -> Stall:
    """Returns a quantile of some stalls by nearest rank; its bounds are the quantiles of their bounds."""
    place = math.ceil(part * len(stalls)) - 1
    most_ns = sorted(math.inf if each.most_ns is None else each.most_ns for each in stalls)[place]
    return Stall(sorted(each.least_ns for each in stalls)[place], None if most_ns == math.inf else int(most_ns))


def _text(time_ns: int) -> str:
    if time_ns >= 1e9:
        return f"{time_ns / 1e9:.2f} s"
    return f"{time_ns / 1e6:.0f} ms" if time_ns >= 1e7 else f"{time_ns / 1e6:.1f} ms"
