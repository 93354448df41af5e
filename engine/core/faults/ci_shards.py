"""CI shards: a matrix cut into parts of about equal time, one per CI job.

Rules: the cut is a pure function of cells and times, so that jobs that compute it separately agree and every cell is in
exactly one shard. A cell without a known time counts with the median of the others. Cells keep their order in a shard.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from engine.core.errors import Problem, UserError

MAX_JOBS = 256  # GitHub's limit for one workflow matrix


@dataclass(frozen=True, slots=True)
class CiShard:
    """Part `index`, from 1, of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_part(text: str) -> CiShard:
    """Returns the part that a text such as ``3/8`` names.

    Raises:
        UserError: the text has another form, or the part is not in 1 to count.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
    part = CiShard(int(match[1]), int(match[2])) if match else CiShard(0, 0)
    if not 1 <= part.index <= part.count:
        raise UserError([Problem("--shard", "a part such as 3/8, from 1/8 to 8/8", repr(text))])
    return part


def estimated(names: Sequence[str], seconds: Mapping[str, float], usual_s: float = 1.0) -> dict[str, float]:
    """Returns the expected seconds of each cell: its last time, or else the median of the others."""
    known = [seconds[name] for name in names if name in seconds]
    usual_s = median(known) if known else usual_s
    return {name: seconds.get(name, usual_s) for name in names}


def shards(names: Sequence[str], count: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """Returns the names in `count` parts: assigns the longest first, each to the part with the least total time."""
    times = estimated(names, seconds)
    place = {name: number for number, name in enumerate(names)}
    parts: list[list[str]] = [[] for _ in range(count)]
    heap = [(0.0, index) for index in range(count)]
    for name in sorted(names, key=lambda name: (-times[name], place[name])):
        total, index = heapq.heappop(heap)
        parts[index].append(name)
        heapq.heappush(heap, (total + times[name], index))
    return [sorted(part, key=place.__getitem__) for part in parts]


def workflow_matrix(
    matrix: str, names: Sequence[str], count: int, seconds: Mapping[str, float]
) -> dict[str, list[dict[str, str | int]]]:
    """Returns the matrix of a GitHub workflow: one job per shard, at most `MAX_JOBS`, none of them empty."""
    count = max(1, min(count, len(names), MAX_JOBS))
    return {
        "include": [
            {"matrix": matrix, "shard": str(CiShard(index, count)), "cells": len(part)}
            for index, part in enumerate(shards(names, count, seconds), start=1)
        ]
    }
