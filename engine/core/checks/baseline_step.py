"""The usual time of a step, and its usual rest after an action: the baselines of the cost of a recovery.

Rules: only steps after the first given commit count, because a step lasts from the commit before it to its own. Times
are nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from statistics import median

from engine.core.action import Action

Commits = Sequence[tuple[int, int]]  # (step, time) of consecutive steps
FinishedAction = tuple[int, int, Action, int]  # step, worker, action, end


def baseline_ns(commits: Commits) -> int | None:
    """Returns the median time between commits, or None with fewer than two."""
    between = [later - earlier for (_, earlier), (_, later) in pairwise(commits)]
    return int(median(between)) if between else None


def remaining_ns(commits: Commits, entries: Collection[FinishedAction], at_ns: int) -> int | None:
    """Returns the usual rest, at a time, of the step after the last commit; None if unknown.

    The last action before that time is searched in the earlier steps; the rest is the median of the times from that
    action, by the same worker, to the commit of its step.
    """
    before = [(end_ns, step, worker, action) for step, worker, action, end_ns in entries if end_ns <= at_ns]
    if not before or not commits:
        return None
    last_ns, at, *last = max(before)
    ahead = commits[-1][0] + 1 - at  # the last action may belong to the step before
    left = [
        dict(commits)[step + ahead] - end_ns
        for step, worker, action, end_ns in entries
        if [worker, action] == last and commits[0][0] < step <= commits[-1][0] - ahead
    ]
    return int(median(left)) - (at_ns - last_ns) if left else None
