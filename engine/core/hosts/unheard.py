"""The decisions of a run that a host has not heard, and another one that is left has.

Rules: each host has heard a beginning of one list of decisions, so the longest one has all that is left. A commit is
told to a host before it is told to its workers, so a host with a vote for a step has heard of all steps before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from engine.core.errors import InvariantError


def unheard(known: int, told: Iterable[Mapping[int, str]]) -> tuple[str, ...]:
    """Returns the decisions that a host lacks, which knows the first ones, `known` of them.

    `told` has of each other host some decisions by number. Raises InvariantError if two hosts contradict each other.
    """
    found: dict[int, str] = {}
    for each in told:
        for number, line in each.items():
            if found.setdefault(number, line) != line:
                raise InvariantError(f"two hosts have heard different decisions, both with number {number}")
    following: list[str] = []
    while (line := found.get(known + len(following), "")) != "":
        following.append(line)
    return tuple(following)
