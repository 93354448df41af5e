"""Candidates: ownerships that are worth a dry run, in a fixed order.

Workers stand in the order of their present slots. A worker without slots is tried at each place, and so is the slowest
one. With several pipelines a worker may have runs in two of them. The places of these runs matter: the last run of a
pipeline waits for the whole fill. So a search goes on from a good cut to its neighbours: a border moves by one slot, or
two runs of a pipeline take each other's place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from engine.core.elastic.cuts import Cutter, Owners, Price
from engine.core.elastic.measured import MeasuredFacts
from engine.core.elastic.runs import are_whole, load_of, runs_of
from engine.core.ownership import Grid

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
