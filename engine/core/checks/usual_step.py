"""What a step usually takes, and what is left of it after an action: to tell what a recovery cost.

Rules: only steps after the first of the given commits count, each with the commit before it. The two measures share no
time but that of a commit at the end. Times are in nanoseconds.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from statistics import median

from engine.core.action import Action

Commits = Sequence[tuple[int, int]]  # (step, time), without a gap
Entry = tuple[int, int, Action, int]  # step, worker, action, when it was finished


def usual_ns(commits: Commits) -> int | None:
    """Returns the median between commits, or None of fewer than two."""
    between = [later - earlier for (_, earlier), (_, later) in pairwise(commits)]
    return int(median(between)) if between else None


def left_ns(commits: Commits, entries: Collection[Entry], at_ns: int) -> int | None:
    """Returns what usually is left at a time of the step after the last commit, or None if that is not known.

    It is what was left in other steps when the same worker had finished the action that here was the last before.
    """
    before = [(end_ns, step, worker, action) for step, worker, action, end_ns in entries if end_ns <= at_ns]
    if not before or not commits:
        return None
    last_ns, at, *last = max(before)
    ahead = commits[-1][0] + 1 - at  # the last action may be of the step before
    left = [
        dict(commits)[step + ahead] - end_ns
        for step, worker, action, end_ns in entries
        if [worker, action] == last and commits[0][0] < step <= commits[-1][0] - ahead
    ]
    return int(median(left)) - (at_ns - last_ns) if left else None
