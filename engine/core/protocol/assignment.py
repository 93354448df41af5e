"""The policy: from measured facts, members and present replicas to the wanted owners and shadows, with the reason.

Rules: a move gives each worker one run of consecutive slots in a pipeline at most. The step with the shortest dry run
wins, and of several such the one with the fewest bytes that move. Slots move only if the next hundred steps pay the
move back: the price of an ownership is the time of a hundred steps, and the time of the hand-over. So a worker keeps
the two runs that a death has left it while no move is better. A worker whose memory does not suffice for one slot gets
none. A slow worker keeps one if the step is little longer for it. Pipelines, microbatches and the order of samples
stay, so no bit depends on an owner. The same facts give the same owners in each process: no loop follows the order of
a set.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from engine.core.errors import ensure, required
from engine.core.ownership import Grid, Ownership, Redundancy, Slot, with_shadows
from engine.core.protocol.candidates import (
    MeasuredFacts,
    Owners,
    are_alike,
    are_whole,
    cuts,
    host_borders,
    in_order,
    load_of,
    neighbours,
    runs_of,
    step_time,
)
from engine.core.texts import counted, numbered, size_text

HORIZON_STEPS = 100  # in which a move must have paid
_LEAST_GAIN = 0.02  # of a step, below which nothing moves of the policy's own will
_MOST_TASKS, _FEW_TASKS = 12_000, 3_000  # in the dry runs of a search, with several pipelines and with one
_FURTHER_RUN = 0.02  # of a step, for the transfers of each run, which a dry run does not count
_NEAR = 0.005  # of the best price: then the fewest bytes count
_EVEN = 1.001  # times the mean
_KEPT = 1.08  # times the step, in which a slow worker keeps a slot
_Shadows = tuple[tuple[int, ...], ...]


class Assignment(NamedTuple):
    """The wanted owners of all slots by place, the reason in words, and the wanted shadows; `gain` is of a step's time.

    `gain` is the part of a step's time that the owners save: 0 if nothing moves, below 0 if there are fewer workers.
    """

    owners: Owners
    why: str
    shadows: _Shadows = ()
    gain: float = 0.0


class _Option(NamedTuple):
    """Owners with their price in time; of two options the lesser one wins."""

    price: float
    moved: int
    borders: int  # between hosts
    number: int
    owners: Owners
    time: float


class _Options:
    """The owners that were tried, each once, with their prices."""

    def __init__(
        self, ownership: Ownership, measured: MeasuredFacts, whole: Mapping[int, Collection[Slot]], num_workers: int
    ):
        self.present, self.grid, self.measured = ownership.owners, ownership.grid, measured
        self.num_workers = num_workers
        self.held = {worker: {self.grid.place(slot) for slot in slots} for worker, slots in whole.items()}
        self.tried: dict[Owners, _Option] = {}
        self.num_tasks = 0

    def price(self, worker: int, place: int) -> int:
        """Returns the price of a move: the bytes that are copied, and one for a change of the owner."""
        if self.present[place] == worker:
            return 0
        return 1 if place in self.held.get(worker, ()) else 1 + self.measured.moved_bytes(place % self.grid.stages)

    def option(self, owners: Owners) -> _Option:
        """Returns the option for some owners, by a dry run if they are new."""
        if owners not in self.tried:
            time = step_time(owners, self.grid, self.measured)
            moved = sum(self.price(owner, place) for place, owner in enumerate(owners))
            hand_over_s = self.move_time(moved) if moved else 0.0
            num_runs = sum(map(len, runs_of(owners, self.grid)))
            self.num_tasks += 2 * num_runs * self.grid.microbatches
            transfers = 1 + _FURTHER_RUN * num_runs
            # Nine digits: the same sum in another order is the same price.
            price = float(f"{HORIZON_STEPS * time * transfers + hand_over_s:.9g}")
            borders = host_borders(owners, self.measured)
            self.tried[owners] = _Option(price, moved, borders, len(self.tried), owners, time)
        return self.tried[owners]

    def move_time(self, moved: int) -> float:
        """Returns the time of a hand-over; in units, to copy all replicas takes as long as a step at the best."""
        if self.measured.in_seconds:
            return self.measured.pause_s + moved / self.measured.bytes_per_s
        stages, all_work = range(self.grid.stages), self.grid.microbatches * sum(self.measured.costs(self.grid))
        return moved / sum(map(self.measured.moved_bytes, stages)) * all_work / self.num_workers

    def fits(self, owners: Owners) -> bool:
        """Returns whether the memory of each owner suffices."""
        needs: dict[int, int] = {}
        for place, owner in enumerate(owners):
            needs[owner] = needs.get(owner, 0) + self.measured.needed_bytes(place % self.grid.stages)
        return all(need <= self.measured.memory.get(owner, need) for owner, need in needs.items())

    def least_price(self, owners: Owners) -> float:
        """Returns a price that the owners exceed at least: the slowest worker does nothing but work."""
        runs = runs_of(owners, self.grid)
        slowest = max(load_of(runs, self.grid, self.measured).values())
        return HORIZON_STEPS * self.grid.microbatches * slowest * (1 + _FURTHER_RUN * sum(map(len, runs)))

    def is_even(self, owners: Owners, num_workers: int) -> bool:
        """Returns whether no other owners can be better: all workers have one run, and work equally long."""
        runs = runs_of(owners, self.grid)
        loads = list(load_of(runs, self.grid, self.measured).values())
        return num_workers == sum(map(len, runs)) and max(loads) * num_workers <= _EVEN * sum(loads)


def assign(
    ownership: Ownership,
    workers: Collection[int],
    measured: MeasuredFacts | None = None,
    whole: Mapping[int, Collection[Slot]] | None = None,
    redundancy: Redundancy = "none",
    level: int = 0,
) -> Assignment:
    """Returns the wanted owners of all slots, and their shadows.

    `ownership` is the present one, `workers` are the members that may own, `whole` has the slots of which a worker
    holds a whole replica, beside those that it owns. Raises InvariantError if `workers` is empty.
    """
    ensure(len(workers) > 0, "a member may own slots")
    known, grid = measured or MeasuredFacts(), ownership.grid
    able, words = _able(sorted(workers), known, grid)
    options = _Options(ownership, known, whole or {}, len(able))
    found = _best(options, able)
    if found is None:
        words.append("the memory of all workers together does not suffice, and is left out of account")
        options = _Options(ownership, replace(known, memory={}), whole or {}, len(able))
        found = required(_best(options, able), "without limits of memory there is a cut")
    found = _with_slow(options, found, able)
    stays = options.option(ownership.owners) if {*ownership.owners} <= {*able} else None
    if stays is not None and (found.price >= stays.price or found.time > (1 - _LEAST_GAIN) * stays.time):
        found = stays
    words = [*_move_words(options, found, stays), *words]
    wanted = _kept_shadows(ownership, found.owners, able, redundancy, level)
    shadows = with_shadows(wanted, redundancy, level, able, host_of=known.host_of).shadows
    before = options.option(ownership.owners).time
    return Assignment(found.owners, "; ".join(words), shadows, 1 - found.time / before)


def _able(workers: list[int], measured: MeasuredFacts, grid: Grid) -> tuple[list[int], list[str]]:
    """Returns the workers whose memory suffices for one slot, and words about the others; all if there is none."""
    least = min(map(measured.needed_bytes, range(grid.stages)))
    able = [worker for worker in workers if measured.memory.get(worker, least) >= least]
    words = [
        f"worker {worker} gets no {grid.noun}: one takes {size_text(least)}, "
        f"and it has {size_text(measured.memory[worker])}"
        for worker in workers
        if worker not in able
    ]
    return able or workers, words


def _best(options: _Options, able: list[int]) -> _Option | None:
    """Returns the best option that the search finds; None if memory suffices for no cut."""
    grid, measured = options.grid, options.measured
    order = in_order(options.present, able, grid, measured, options.price)
    found = cuts(order, grid, measured, options.price)
    if not found[0]:
        return None
    starts, others = ([options.option(owners) for owners in each] for each in found)
    good = [*starts, *others]
    if not are_alike(able, measured) or (grid.pipelines > 1 and not options.is_even(min(good).owners, len(able))):
        start = min(starts, key=lambda each: (-len({*each.owners}), each))
        good.append(_climbed(options, start, able))
    limit = min(good).price * (1 + _NEAR)
    return min((each for each in good if each.price <= limit), key=lambda each: (each.moved, each))


def _with_slow(options: _Options, found: _Option, able: list[int]) -> _Option:
    """Returns owners in which each slow owner keeps a slot, if the step takes little longer.

    A worker that computes nothing could not be seen to be well again.
    """
    for worker in able:
        if options.measured.speed_of(worker) == 1 or worker in found.owners or worker not in options.present:
            continue
        places = range(len(found.owners))
        others = [(*found.owners[:place], worker, *found.owners[place + 1 :]) for place in places]
        kept = [
            options.option(owners)
            for owners in others
            if {*found.owners} <= {*owners} and are_whole(runs_of(owners, options.grid)) and options.fits(owners)
        ]
        best = min(kept, default=found)
        found = best if best.time <= _KEPT * found.time else found
    return found


def _climbed(options: _Options, best: _Option, workers: list[int]) -> _Option:
    """Returns the last of a chain of neighbours, each better than the one before."""
    grid, measured = options.grid, options.measured
    most = options.num_tasks + (_MOST_TASKS if grid.pipelines > 1 else _FEW_TASKS)
    steps = neighbours(best.owners, workers, grid, measured)
    while options.num_tasks < most and (owners := next(steps, None)) is not None:
        if options.least_price(owners) < best.price and options.fits(owners):
            found = options.option(owners)
            if found.price < best.price:
                best, steps = found, neighbours(found.owners, workers, grid, measured)
    return best


def _kept_shadows(
    ownership: Ownership, owners: Owners, able: Collection[int], redundancy: Redundancy, level: int
) -> Ownership:
    """Returns the wanted owners with the shadows that hold a replica already, up to the wanted number."""
    lines = []
    for slot, owner in zip(ownership.grid.slots(), owners, strict=True):
        holders = [each for each in ownership.replicas(*slot) if each != owner and each in able]
        lines.append(tuple(holders[:level]))
    return replace(ownership, owners=owners, shadows=tuple(lines) if redundancy != "none" else ())


def _move_words(options: _Options, found: _Option, stays: _Option | None) -> list[str]:
    """Returns the move in words: the slots, the time of a step before and after, and the steps that pay it back."""
    measured, present = options.measured, options.present
    unit = "s" if measured.in_seconds else "units"
    if found is stays:
        best = min(options.tried.values(), key=lambda option: (option.time, option))
        if best is stays:
            return [f"nothing moves: a step is predicted to take {stays.time:.4g} {unit}, and no better cut was found"]
        return [
            f"nothing moves: a step is predicted to take {stays.time:.4g} {unit}, and one of {best.time:.4g} {unit} "
            f"would not pay for the move in {HORIZON_STEPS} steps"
        ]
    changed = [place for place, (was, owner) in enumerate(zip(present, found.owners, strict=True)) if was != owner]
    copied = found.moved - len(changed)
    before = options.option(present).time
    words = f"{counted(len(changed), options.grid.noun)} of {len(present)} move{_in_pipelines(changed, options.grid)}"
    words += f", {size_text(copied)} are copied" if measured.replica_bytes else ""
    words += f": a step is predicted to take {found.time:.4g} {unit} instead of {before:.4g}"
    if stays is not None:
        words += f", which pays in {counted(math.ceil(options.move_time(found.moved) / (before - found.time)), 'step')}"
    gone = sorted({*present} - {*found.owners})
    new = sorted({*found.owners} - {*present})
    parts = [words]
    if gone:
        parts.append(f"{numbered('worker', gone)} {'owns' if len(gone) == 1 else 'own'} none any more")
    if new:
        parts.append(f"{numbered('worker', new)} {'is a new owner' if len(new) == 1 else 'are new owners'}")
    return parts


def _in_pipelines(places: Collection[int], grid: Grid) -> str:
    """Returns how many of some slots each pipeline has, in words; nothing if there is one pipeline."""
    if grid.pipelines == 1:
        return ""
    numbers = Counter(place // grid.stages for place in places)
    return f" ({', '.join(f'{numbers[each]} of pipeline {each}' for each in sorted(numbers))})"
