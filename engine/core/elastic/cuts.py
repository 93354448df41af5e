"""Cuts: all slots in a row, in one piece per worker: the least slowest worker, then the least price of moves.

    slots     0 1 2 3 4 5 | 6 7 8 9 10 11        two pipelines, one behind the other
    workers   a a a a b b | b c c c c  c         b has a run in each of them

Both searches are exact for a given order of the workers.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.core.elastic.measured import MeasuredFacts
from engine.core.ownership import Grid

Owners = tuple[int, ...]  # by place
Price = Callable[[int, int], int]  # takes a worker and a place; returns the price of the slot's move to the worker
_TOLERANCE = 1 + 1e-9  # sums of the same seconds in another order differ by less
_MOST_HALVINGS = 64


class SlotCut(NamedTuple):
    """The owners of all slots by place, and the price of all moves to them."""

    owners: Owners
    price: int


class Cutter:
    """The sums over all slots by which they are cut for workers in a given order.

    With `walls` no piece goes on from one pipeline to the next, so that no worker has two runs.
    """

    def __init__(self, workers: Sequence[int], grid: Grid, measured: MeasuredFacts, price: Price, walls: bool = False):
        self.workers, self.measured, self.price = workers, measured, price
        stages = [stage for _, stage in grid.slots()]
        costs = measured.costs(grid)
        self.length = len(stages)
        self.room = grid.stages if walls else self.length  # from one wall to the next
        self.work = list(accumulate((costs[stage] for stage in stages), initial=0.0))
        self.need = list(accumulate(map(measured.needed_bytes, stages), initial=0))

    def least_slowest(self) -> float | None:
        """Returns the least time of the slowest worker over all cuts; None if memory suffices for none of them."""
        speeds = [self.measured.speed_of(worker) for worker in self.workers]
        low, high = self.work[-1] / sum(speeds), _TOLERANCE * self.work[-1] / min(speeds)
        end, high, _ = self._greedy(high)
        if end < self.length:
            return None
        for _ in range(_MOST_HALVINGS):
            if low * _TOLERANCE >= high:
                break
            end, slowest, following = self._greedy(low)  # the least limit that may do
            if end == self.length:
                return slowest
            low = following
            middle = (low + high) / 2
            end, slowest, following = self._greedy(middle)
            if end == self.length:
                high = slowest
            else:
                low = following
        return high

    def longest_first(self, slowest: float) -> SlotCut:
        """Returns the cut whose pieces are as long as they can be, with no worker above `slowest`."""
        ends, begin = [], 0
        for worker in self.workers:
            begin = self._reach(worker, begin, slowest)
            ends.append(begin)
        return self._cut(ends)

    def least_price(self, slowest: float) -> SlotCut:
        """Returns the cut of the least price, then the most even one, with no worker above `slowest`."""
        return self._best([self._moved(worker) for worker in self.workers], slowest)

    def most_even(self, slowest: float) -> SlotCut:
        """Returns the most even cut with no worker above `slowest`."""
        return self._best([[0] * (self.length + 1)] * len(self.workers), slowest)

    def _best(self, moved_to: Sequence[Sequence[int]], slowest: float) -> SlotCut:
        """Returns the cut with the least sum of `moved_to`, which has for each worker its sums, then the most even."""
        least = self._least_begins(slowest)
        best: dict[int, tuple[int, float, tuple[int, ...]]] = {0: (0, 0.0, ())}
        for number, worker in enumerate(self.workers):
            moved, speed = moved_to[number], self.measured.speed_of(worker)
            new: dict[int, tuple[int, float, tuple[int, ...]]] = {}
            for begin, (so_far, uneven, ends) in best.items():
                for end in range(max(begin, least[number + 1]), self._reach(worker, begin, slowest) + 1):
                    load = (self.work[end] - self.work[begin]) / speed
                    price = so_far + moved[end] - moved[begin], uneven + load * load
                    known = new.get(end)
                    if known is None or price < known[:2]:
                        new[end] = (*price, (*ends, end))
            best = new
        return self._cut(best[self.length][2])

    def _reach(self, worker: int, begin: int, slowest: float) -> int:
        """Returns the furthest end of a worker's piece from `begin` on."""
        most = (self.work[begin] + slowest * self.measured.speed_of(worker)) * _TOLERANCE
        end = min(bisect_right(self.work, most) - 1, self.length, begin + self.room - begin % self.room)
        if worker in self.measured.memory:
            end = min(end, bisect_right(self.need, self.need[begin] + self.measured.memory[worker]) - 1)
        return end

    def _greedy(self, slowest: float) -> tuple[int, float, float]:
        """Returns the end of pieces as long as can be, their slowest, and the least limit that makes one longer."""
        begin, found, following = 0, 0.0, float("inf")
        for worker in self.workers:
            end, speed = self._reach(worker, begin, slowest), self.measured.speed_of(worker)
            found = max(found, (self.work[end] - self.work[begin]) / speed)
            if end < self.length:
                following = min(following, max(slowest, (self.work[end + 1] - self.work[begin]) / speed))
            begin = end
        return begin, found, following

    def _least_begins(self, slowest: float) -> list[int]:
        """Returns for each worker the first begin from which it and the workers behind it come to the end."""
        found = [self.length]
        for worker in reversed(self.workers):
            end = found[-1]
            found.append(bisect_left([self._reach(worker, begin, slowest) for begin in range(end + 1)], end))
        return found[::-1]

    def _moved(self, worker: int) -> list[int]:
        return list(accumulate((self.price(worker, place) for place in range(self.length)), initial=0))

    def _cut(self, ends: Sequence[int]) -> SlotCut:
        begins = [0, *ends[:-1]]
        pieces = list(zip(self.workers, begins, ends, strict=True))
        return SlotCut(
            tuple(worker for worker, begin, end in pieces for _ in range(begin, end)),
            sum(self.price(worker, place) for worker, begin, end in pieces for place in range(begin, end)),
        )
