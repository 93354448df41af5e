"""Shards: a matrix cut into parts that take about the same time, and groups of them for those who run few jobs.

Rules: pure and stable: whoever cuts the same cells with the same times gets the same shards, so every cell is in
exactly one. Times of which nothing is known are taken to be the median of the others. In a shard, cells keep their
order.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from engine.core.errors import Problem, UserError

MAX_JOBS = 256  # of one workflow matrix, as GitHub has it


@dataclass(frozen=True, slots=True)
class Part:
    """Part `index`, from 1, of `count`."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def parse_part(text: str) -> Part:
    """Returns what ``3/8`` spells.

    Raises:
        UserError: it is no such thing.
    """
    match = re.fullmatch(r"([0-9]{1,6})/([0-9]{1,6})", text.strip())
    part = Part(int(match[1]), int(match[2])) if match else Part(0, 0)
    if not 1 <= part.index <= part.count:
        raise UserError([Problem("--shard", "a part such as 3/8, from 1/8 to 8/8", repr(text))])
    return part


def estimated(names: Sequence[str], seconds: Mapping[str, float], usual_s: float = 1.0) -> dict[str, float]:
    """Returns what each cell will take: what it took before, or else what the others do."""
    known = [seconds[name] for name in names if name in seconds]
    usual_s = median(known) if known else usual_s
    return {name: seconds.get(name, usual_s) for name in names}


def shards(names: Sequence[str], count: int, seconds: Mapping[str, float]) -> list[list[str]]:
    """Returns the names in `count` parts: the longest first, each to the part that has least to do."""
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
    """Returns the matrix of a workflow: one job per shard, at most as many as there may be, none of them empty."""
    count = max(1, min(count, len(names), MAX_JOBS))
    return {
        "include": [
            {"matrix": matrix, "shard": str(Part(index, count)), "cells": len(part)}
            for index, part in enumerate(shards(names, count, seconds), start=1)
        ]
    }
