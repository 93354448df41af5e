"""Candidates: ownerships that are worth a dry run, in a fixed order; the runs and cuts that they are made of."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from engine.core.ownership import Grid, Ownership, Slot
from engine.core.program.remaining_tasks import in_flight, starts

# The facts that an assignment goes by: seconds of stages, speeds, memory and hosts of workers, the price of a move.


BYTES_PER_S, PAUSE_S = 1e9, 0.05  # first guesses
_UNIT_FORWARD, _UNIT_BACKWARD = 1.0, 2.0


@dataclass(frozen=True, slots=True)
class MeasuredFacts:
    """The facts that are known; without seconds each stage costs one unit forward and two backward.

    Tuples have one entry per stage, because the slots of a stage are alike in all pipelines. Empty means unknown.
    """

    forward_s: tuple[float, ...] = ()
    backward_s: tuple[float, ...] = ()
    speed: Mapping[int, float] = field(default_factory=dict)  # worker -> 1 as usual, 0.5 if all takes twice as long
    replica_bytes: tuple[int, ...] = ()  # of weights and optimizer state, which a move copies
    owned_bytes: tuple[int, ...] = ()  # of all that an owner holds for a slot
    memory: Mapping[int, int] = field(
        default_factory=dict
    )  # worker -> bytes for slots; a worker that is absent has enough
    host_of: Mapping[int, str] = field(default_factory=dict)  # worker -> host; empty: all on one
    bytes_per_s: float = BYTES_PER_S  # between two workers
    pause_s: float = PAUSE_S  # of training, for a prepared hand-over

    @property
    def in_seconds(self) -> bool:
        """Whether times are seconds, and not units."""
        return bool(self.forward_s)

    def forwards(self, grid: Grid) -> list[float]:
        """Returns the time of one forward of all stages before each stage, and of all."""
        return _sums(self.forward_s or (_UNIT_FORWARD,) * grid.stages)

    def backwards(self, grid: Grid) -> list[float]:
        """Returns the time of one backward of all stages before each stage, and of all."""
        return _sums(self.backward_s or (_UNIT_BACKWARD,) * grid.stages)

    def costs(self, grid: Grid) -> list[float]:
        """Returns the time of one forward and backward of each stage on a worker of usual speed."""
        forward = self.forward_s or (_UNIT_FORWARD,) * grid.stages
        backward = self.backward_s or (_UNIT_BACKWARD,) * grid.stages
        return [one + other for one, other in zip(forward, backward, strict=True)]

    def moved_bytes(self, stage: int) -> int:
        """Returns the bytes of a replica of a stage; 1 if unknown, so that the fewest slots move."""
        return self.replica_bytes[stage] if self.replica_bytes else 1

    def needed_bytes(self, stage: int) -> int:
        """Returns the bytes that an owner of a stage needs; 0 if unknown."""
        return self.owned_bytes[stage] if self.owned_bytes else 0

    def speed_of(self, worker: int) -> float:
        """Returns the speed of a worker; 1 if unknown."""
        return self.speed.get(worker, 1.0)


def _sums(values: tuple[float, ...]) -> list[float]:
    return list(accumulate(values, initial=0.0))


# Runs: the consecutive slots of a pipeline that one worker owns, and the time of a step that goes through them.
#
# A worker has one run in each pipeline at most. The time is that of the list scheduler with runs in place of slots.

_STEADY = 16  # microbatches; any further one takes as long as the slowest worker


class SlotRun(NamedTuple):
    """The slots of stages `first` to ``end - 1`` of a pipeline, which `worker` owns."""

    pipeline: int
    first: int
    end: int
    worker: int


def runs_of(owners: Sequence[int], grid: Grid) -> tuple[tuple[SlotRun, ...], ...]:
    """Returns the runs of each pipeline, in the order of its stages."""
    return tuple(
        tuple(_runs(owners[pipeline * grid.stages : (pipeline + 1) * grid.stages], pipeline))
        for pipeline in range(grid.pipelines)
    )


def are_whole(runs: Sequence[Sequence[SlotRun]]) -> bool:
    """Returns whether no worker has two runs in a pipeline."""
    return all(len({each.worker for each in line}) == len(line) for line in runs)


def load_of(runs: Sequence[Sequence[SlotRun]], grid: Grid, measured: MeasuredFacts) -> dict[int, float]:
    """Returns the time that each owner computes for one microbatch of each of its pipelines, by worker."""
    forward, backward = measured.forwards(grid), measured.backwards(grid)
    loads: dict[int, float] = {}
    for _, first, end, worker in (each for line in runs for each in line):
        work = forward[end] - forward[first] + backward[end] - backward[first]
        loads[worker] = loads.get(worker, 0.0) + work / measured.speed_of(worker)
    return loads


def step_time(owners: Sequence[int], grid: Grid, measured: MeasuredFacts) -> float:
    """Returns the time of a step, in seconds or units, without transfers."""
    runs = runs_of(owners, grid)
    steady = max(_STEADY, 2 * max(map(len, runs)))
    further = max(0, grid.microbatches - steady)
    windows = in_flight(Ownership(grid, tuple(owners)))
    time = _dry(runs, windows, min(grid.microbatches, steady), grid, measured)
    return time + further * max(load_of(runs, grid, measured).values())


def _runs(owners: Sequence[int], pipeline: int) -> list[SlotRun]:
    found, first = [], 0
    for worker, group in groupby(owners):
        end = first + len(list(group))
        found.append(SlotRun(pipeline, first, end, worker))
        first = end
    return found


def _dry(
    runs: Sequence[Sequence[SlotRun]],
    windows: Mapping[Slot, int],
    microbatches: int,
    grid: Grid,
    measured: MeasuredFacts,
) -> float:
    """Returns the time of some microbatches. The number of a task is its priority."""
    order = sorted((each for line in runs for each in line), key=lambda run: (-run.first, run.pipeline))
    number = {run: each for each, run in enumerate(order)}
    width, forwards = len(order), len(order) * microbatches
    needs: list[list[int]] = [[] for _ in range(2 * forwards)]
    for line in runs:
        for at, run in enumerate(line):
            window = windows[run.pipeline, run.first]
            for microbatch in range(microbatches):
                forward = microbatch * width + number[run]
                backward = forwards + forward
                needs[backward].append(forward)
                if at > 0:
                    needs[forward].append(microbatch * width + number[line[at - 1]])
                if at + 1 < len(line):
                    needs[backward].append(forwards + microbatch * width + number[line[at + 1]])
                if microbatch > 0:
                    needs[forward].append(forward - width)
                    needs[backward].append(backward - width)
                if microbatch >= window:
                    needs[forward].append(backward - window * width)
    costs = [
        (sums[run.end] - sums[run.first]) / measured.speed_of(run.worker)
        for sums in (measured.forwards(grid), measured.backwards(grid))
        for _ in range(microbatches)
        for run in order
    ]
    return starts([run.worker for run in order] * (2 * microbatches), costs, needs)[1]


# Cuts: all slots in a row, in one piece per worker: the least slowest worker, then the least price of moves.
#
#     slots     0 1 2 3 4 5 | 6 7 8 9 10 11        two pipelines, one behind the other
#     workers   a a a a b b | b c c c c  c         b has a run in each of them
#
# Both searches are exact for a given order of the workers.

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


# Candidates: ownerships that are worth a dry run, in a fixed order.
#
# Workers stand in the order of their present slots. A worker without slots is tried at each place, and so is the
# slowest one. With several pipelines a worker may have runs in two of them. The places of these runs matter: the last
# run of a pipeline waits for the whole fill. So a search goes on from a good cut to its neighbours: a border moves by
# one slot, or two runs of a pipeline take each other's place.

_LOOSER = (1.25, 2.0)  # times the least slowest: fewer bytes move
_FEW = 2  # workers that are tried for a slot
_SHORTER = 1.001  # by which another place of the slowest worker must shorten the slowest piece


def in_order(present: Owners, workers: Sequence[int], grid: Grid, measured: MeasuredFacts, price: Price) -> list[int]:
    """Returns the workers in the order of their pieces, each new one where the slowest piece is the shortest.

    Of several such places it takes the one of the least price.
    """
    first = {worker: at for at, worker in reversed(list(enumerate(present)))}
    order = sorted((worker for worker in workers if worker in first), key=first.__getitem__)
    for worker in sorted(worker for worker in workers if worker not in first):
        order = _placed(worker, order, grid, measured, price)
    if are_alike(order, measured):
        return order
    slowest = min(order, key=lambda worker: (measured.speed_of(worker), worker))
    other = _placed(slowest, [worker for worker in order if worker != slowest], grid, measured, price)
    now, then = (_slowest(each, grid, measured, price) for each in (order, other))
    return other if then * _SHORTER < now else order


def cuts(order: Sequence[int], grid: Grid, measured: MeasuredFacts, price: Price) -> tuple[list[Owners], list[Owners]]:
    """Returns cuts for workers in an order from which a search can go on, and others; none if memory is too small.

    Of one pipeline and alike workers it is the one with the least slowest worker, then with the fewest bytes.
    """
    starts, others = [], []
    for walls in (False, True)[: grid.pipelines]:
        cutter = Cutter(order, grid, measured, price, walls)
        slowest = cutter.least_slowest()
        if slowest is None:
            continue
        starts.append(cutter.least_price(slowest).owners)
        others += [cutter.least_price(slowest * factor).owners for factor in _LOOSER if measured.in_seconds]
        if grid.pipelines > 1 or not are_alike(order, measured):
            starts.append(cutter.most_even(slowest).owners)
            others.append(cutter.longest_first(slowest).owners)
    return starts, others


def are_alike(workers: Iterable[int], measured: MeasuredFacts) -> bool:
    """Returns whether all workers have one speed."""
    return len({measured.speed_of(worker) for worker in workers}) == 1


def neighbours(owners: Owners, workers: Sequence[int], grid: Grid, measured: MeasuredFacts) -> Iterator[Owners]:
    """Yields owners that differ a little, of which no worker has two runs in a pipeline."""
    for found in (*_lightened(owners, workers, grid, measured), *_shifted(owners, grid)):
        if are_whole(runs_of(found, grid)):
            yield found


def _shifted(owners: Owners, grid: Grid) -> Iterator[Owners]:
    """Yields the owners with one border moved by a slot, or with two neighbouring runs in turn."""
    for one, other in (pair for line in runs_of(owners, grid) for pair in pairwise(line)):
        base, end = one.pipeline * grid.stages, one.first + other.end - other.first
        yield _given(owners, base + other.first - 1, base + other.first, other.worker)
        yield _given(owners, base + other.first, base + other.first + 1, one.worker)
        turned = _given(owners, base + one.first, base + end, other.worker)
        yield _given(turned, base + end, base + other.end, one.worker)


def _lightened(owners: Owners, workers: Sequence[int], grid: Grid, measured: MeasuredFacts) -> Iterator[Owners]:
    """Yields the owners with the first or last slot of a longest run at a worker that works little."""
    runs = runs_of(owners, grid)
    loads = load_of(runs, grid, measured)
    loads |= {worker: 0.0 for worker in workers if worker not in loads}
    for run in (each for line in runs for each in line if loads[each.worker] * _SHORTER >= max(loads.values())):
        here = [each.worker for each in runs[run.pipeline]]
        others = sorted((worker for worker in loads if worker not in here), key=loads.__getitem__)
        for place in (run.pipeline * grid.stages + each for each in (run.first, run.end - 1)):
            yield from (_given(owners, place, place + 1, other) for other in others[:_FEW])


def _given(owners: Owners, begin: int, end: int, worker: int) -> Owners:
    return (*owners[:begin], *(worker,) * (end - begin), *owners[end:])


def _placed(worker: int, order: Sequence[int], grid: Grid, measured: MeasuredFacts, price: Price) -> list[int]:
    """Returns the order with one worker more, at its best place."""
    orders = [[*order[:at], worker, *order[at:]] for at in range(len(order) + 1)]
    found = []
    for at, each in enumerate(orders):
        cutter = Cutter(each, grid, measured, price)
        slowest = cutter.least_slowest()
        if slowest is not None:
            found.append((round(slowest, 9), cutter.least_price(slowest).price, host_borders(each, measured), at))
    return orders[min(found)[3]] if found else orders[-1]


def _slowest(order: Sequence[int], grid: Grid, measured: MeasuredFacts, price: Price) -> float:
    found = Cutter(order, grid, measured, price).least_slowest()
    return float("inf") if found is None else found


def host_borders(order: Sequence[int], measured: MeasuredFacts) -> int:
    """Returns how often two neighbours in a row of workers are on different hosts."""
    return sum(measured.host_of.get(one) != measured.host_of.get(other) for one, other in pairwise(order))
