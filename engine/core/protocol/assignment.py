"""The policy: from measured facts, members and present replicas to the wanted owners, with the reason.

    slots     0 1 2 3 4 5 | 6 7 8 9 10 11        two pipelines, one behind the other
    workers   a a a a b b | b c c c c  c         b has a run in each of them

Rules: all slots stand in a row and are cut into one piece per worker, in the order of the present owners. A newcomer
takes the place of a worker that is gone, or stands beside workers of its host. The limit of a piece is the least time
at which all pieces together reach the end; of all cuts within it, the one that moves the fewest bytes wins. Looser
limits move fewer bytes still. So a worker has one run of consecutive slots in a pipeline at most. Where workers or
pipelines wait for each other in other ways than in a row, borders move by a slot while that is better.

A schedule with an order of its own runs where the runs stand as its stages (`teams_of`). So where the workers can be
dealt to the pipelines in equal numbers, they are, with the number of runs that the schedule has for so many:

    zbv, 2 workers    0 0 0 0 1 1 1 1 1 1 1 1 0 0 0 0
    4 workers         0 0 1 1 2 2 3 3 3 3 2 2 1 1 0 0

Slots move only if the next hundred steps pay the move back: the price of an ownership is the time of a hundred steps,
and the time of the hand-over. So a worker keeps the two runs that a death has left it while no move is better. A worker
whose memory does not suffice for one slot gets none. A slow worker keeps one if the step is little longer for it.
Pipelines, microbatches and the order of samples stay, so no bit depends on an owner. The same facts give the same
owners in each process: no loop follows the order of a set.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

from engine.core.action import Op
from engine.core.errors import ensure
from engine.core.ownership import Grid, Ownership, Slot, directions_of, worker_of
from engine.core.program.dry_run import makespan_of
from engine.core.program.passes import with_transfers
from engine.core.program.remaining_tasks import in_flight, starts
from engine.core.program.schedules import COSTS, SCHEDULES
from engine.core.program.teams import Team, is_in_list_order, teams_of
from engine.core.protocol.measured_facts import BYTES_PER_S, UNIT_BACKWARD, UNIT_FORWARD, MeasuredFacts
from engine.core.texts import counted, numbered, size_text

HORIZON_STEPS = 100  # in which a move must have paid
_LEAST_GAIN = 0.02  # of a step, below which nothing moves of the policy's own will
_FURTHER_RUN = 0.02  # of a step, for the transfers of each run of a pipeline, which a dry run does not count
_LOOSER = (1.0, 1.25, 2.0)  # times the least limit
_KEPT = 1.08  # times the step, in which a slow worker keeps a slot
_STEADY = 16  # microbatches; any further one takes as long as the slowest worker
_TOLERANCE = 1 + 1e-9  # sums of the same seconds in another order differ by less
_HALVINGS = 60
_MOST_TASKS = 12_000  # in the dry runs of a climb

Owners = tuple[int, ...]  # by place


class Assignment(NamedTuple):
    """The wanted owners of all slots by place, and the reason in words.

    `gain` is the part of a step's time that the owners save: 0 if nothing moves, below 0 if there are fewer workers.
    """

    owners: Owners
    why: str
    gain: float = 0.0


# The time of a step: that of the list scheduler, with runs of consecutive slots of one worker in place of slots.


class SlotRun(NamedTuple):
    """The slots of stages `first` to ``end - 1`` of a pipeline, which `worker` owns."""

    pipeline: int
    first: int
    end: int
    worker: int


def runs_of(owners: Sequence[int], grid: Grid) -> list[list[SlotRun]]:
    """Returns the runs of each pipeline, in the order of its stages."""
    lines: list[list[SlotRun]] = []
    for pipeline in range(grid.pipelines):
        lines.append([])
        first = 0
        for worker, group in groupby(owners[pipeline * grid.stages : (pipeline + 1) * grid.stages]):
            end = first + len(list(group))
            lines[-1].append(SlotRun(pipeline, first, end, worker))
            first = end
    return lines


def step_time(owners: Sequence[int], grid: Grid, measured: MeasuredFacts, schedule: str = "") -> float:
    """Returns the time of a step, in seconds or units, without transfers; no schedule is that of the list scheduler."""
    if not is_in_list_order(schedule, grid) and (teams := teams_of(schedule, Ownership(grid, tuple(owners)))):
        return max(_team_time(team, grid, measured, schedule) for team in teams)
    lines = runs_of(owners, grid)
    microbatches = min(grid.microbatches, max(_STEADY, 2 * max(map(len, lines))))
    order = sorted((run for line in lines for run in line), key=lambda run: (-run.first, run.pipeline))
    forward, backward = (
        [sum(times[run.first : run.end]) / measured.speed_of(run.worker) for run in order]
        for times in (measured.forwards(grid), measured.backwards(grid))
    )
    loads: dict[int, float] = {}
    for run, one, other in zip(order, forward, backward, strict=True):
        loads[run.worker] = loads.get(run.worker, 0.0) + one + other
    workers = [run.worker for run in order] * (2 * microbatches)
    needs = _needs(lines, order, microbatches, in_flight(Ownership(grid, tuple(owners))))
    time = starts(workers, forward * microbatches + backward * microbatches, needs)[1]
    return time + (grid.microbatches - microbatches) * max(loads.values())


def _team_time(team: Team, grid: Grid, measured: MeasuredFacts, schedule: str) -> float:
    """Returns the time of a step of the pipelines of a team by the order of a schedule."""
    num_stages, least = len(team.stages[0]), SCHEDULES[schedule].least_microbatches(len(team.workers))
    microbatches = min(grid.microbatches, max(least, _STEADY, min(2 * num_stages, _MOST_TASKS // num_stages)))
    times = {Op.F: measured.forwards(grid), Op.B: measured.backwards(grid)}
    cost = {
        (op, way, stage): COSTS[op] / COSTS[whole] * sum(times[whole][run.start : run.stop])
        for op, whole in ((Op.F, Op.F), (Op.B, Op.B), (Op.I, Op.B), (Op.W, Op.B))
        for way, runs in enumerate(team.stages)
        for stage, run in enumerate(runs)
    }
    program = {at: team.list_of(schedule, worker, microbatches) for at, worker in enumerate(team.workers)}
    at_stage = {(way, stage): at for at, line in program.items() for stage, _, _, way in line}
    stages = Grid(num_stages, microbatches, len(team.stages))
    ownership = Ownership(stages, tuple(at_stage[slot] for slot in stages.slots()))
    whole = with_transfers(program, ownership)
    costs = {
        at: [cost.get((op, way, stage), 0.0) / measured.speed_of(team.workers[at]) for stage, op, _, way in line]
        for at, line in whole.items()
    }
    further = (grid.microbatches - microbatches) / microbatches
    return makespan_of(whole, ownership, costs) + further * max(map(sum, costs.values()))


def _needs(
    lines: list[list[SlotRun]], order: list[SlotRun], microbatches: int, windows: Mapping[Slot, int]
) -> list[list[int]]:
    """Returns for each task the tasks that end before it starts: the forwards of all microbatches, then the backwards.

    The number of a task is its priority.
    """
    number, width = {run: number for number, run in enumerate(order)}, len(order)
    half = width * microbatches
    needs: list[list[int]] = [[] for _ in range(2 * half)]
    for line in lines:
        for at, run in enumerate(line):
            here, window = number[run], windows[run.pipeline, run.first] * width
            for first in range(0, half, width):
                task = first + here
                needs[half + task].append(task)
                if at > 0:
                    needs[task].append(first + number[line[at - 1]])
                if at + 1 < len(line):
                    needs[half + task].append(half + first + number[line[at + 1]])
                if first > 0:
                    needs[task].append(task - width)
                    needs[half + task].append(half + task - width)
                if first >= window:
                    needs[task].append(half + task - window)
    return needs


# The cut: all slots in a row, in one piece per worker.


def in_order(present: Owners, workers: Sequence[int], measured: MeasuredFacts) -> list[int]:
    """Returns the workers in the order of their slots; a newcomer in the place of another, or beside its host."""
    order, host_of = list(dict.fromkeys(present)), measured.host_of.get
    newcomers = [worker for worker in workers if worker not in order]
    for at, gone in enumerate(order):
        if gone not in workers and newcomers:
            order[at] = min(newcomers, key=lambda worker: (host_of(worker) != host_of(gone), worker))
            newcomers.remove(order[at])
    order = [worker for worker in order if worker in workers]
    for worker in newcomers:
        beside = [at for at, other in enumerate(order) if host_of(other) == host_of(worker)] or range(len(order))
        order.insert(beside[len(beside) // 2] + 1, worker)
    return order


# The moves' price, with the least one of the slots behind, the unevenness, and the begin of the last piece.
_Cut = tuple[int, float, int]


class _Row:
    """All slots in a row, and the workers in the order of their pieces; those in `keep` get a slot at least."""

    def __init__(self, options: _Options, workers: Sequence[int], keep: Collection[int]):
        grid, measured = options.grid, options.measured
        stages = [stage for _, stage in grid.slots()]
        costs = [sum(each) for each in zip(measured.forwards(grid), measured.backwards(grid), strict=True)]
        self.workers, self.measured, self.options, self.length = workers, measured, options, len(stages)
        self.least = [int(worker in keep) for worker in workers]
        self.behind = list(accumulate(self.least[:0:-1], initial=0))[::-1]
        self.work = list(accumulate((costs[stage] for stage in stages), initial=0.0))
        self.need = list(accumulate(map(measured.needed_bytes, stages), initial=0))
        self.near: list[list[int]] = [[] for _ in stages]  # the workers that need no copy of a slot, by their place
        for at, worker in enumerate(workers):
            for place in options.held.get(worker, ()):
                self.near[place].append(at)

    def least_limit(self) -> float | None:
        """Returns the least time of the slowest worker over all cuts; None if memory suffices for none of them."""
        low, high = 0.0, self.work[-1] / min(map(self.measured.speed_of, self.workers))
        if not self._fits(high):
            return None
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self._fits(middle) else (middle, high)
        return high * _TOLERANCE

    def cut(self, limit: float, width: int = 4) -> Owners:
        """Returns the owners of the least price of moves, then the most even ones, with no worker above a limit.

        Only the `width` best cuts up to a worker go on; more of them if one that was dropped may be better.
        """
        rows = [{0: (sum(self._least_price(0, place) for place in range(self.length)), 0.0, 0)}]
        dropped = math.inf
        for at in range(len(self.workers)):
            pieces = self._pieces(at, rows[-1], limit)
            if len(pieces) > width:
                ends = sorted(pieces, key=pieces.__getitem__)
                dropped = min(dropped, pieces[ends[width]][0])
                pieces = {end: pieces[end] for end in sorted(ends[:width])}
            rows.append(pieces)
        if self.length not in rows[-1] or rows[-1][self.length][0] >= dropped:
            return self.cut(limit, 4 * width)
        owners, end = list[int](), self.length
        for worker, pieces in zip(reversed(self.workers), reversed(rows), strict=False):
            begin = pieces[end][2]
            owners += [worker] * (end - begin)
            end = begin
        return tuple(owners[::-1])

    def _pieces(self, at: int, before: Mapping[int, _Cut], limit: float) -> dict[int, _Cut]:
        """Returns the best cut up to each end of a worker's piece, from those up to the ends of the one before it."""
        worker, speed, cuts = self.workers[at], self.measured.speed_of(self.workers[at]), dict[int, _Cut]()
        reaches = [self._reach(at, begin, limit) for begin in before]
        places = range(min(before, default=0), max((*reaches, *before), default=0))
        more = (self.options.price(worker, place) - self._least_price(at + 1, place) for place in places)
        taken = list(accumulate(more, initial=0))
        near = self.options.held.get(worker, ())
        left = {place: self._least_price(at + 1, place) - self._least_price(at, place) for place in near}
        for (begin, (price, uneven, _)), reach in zip(before.items(), reaches, strict=True):
            least = price + sum(rise for place, rise in left.items() if place >= begin) - taken[begin - places.start]
            for end in range(begin + self.least[at], reach + 1):
                load = (self.work[end] - self.work[begin]) / speed
                new = least + taken[end - places.start], uneven + load * load, begin
                if end not in cuts or new < cuts[end]:
                    cuts[end] = new
        return cuts

    def _least_price(self, at: int, place: int) -> int:
        """Returns the least price of a slot for the workers from one on, and any others that hold nothing."""
        near = (self.workers[each] for each in self.near[place] if each >= at)
        return min((self.options.price(worker, place) for worker in near), default=self.options.price(-1, place))

    def _fits(self, limit: float) -> bool:
        end = 0
        for at, least in enumerate(self.least):
            begin, end = end, self._reach(at, end, limit)
            if end < begin + least:
                return False
        return end == self.length

    def _reach(self, at: int, begin: int, limit: float) -> int:
        """Returns the furthest end of a worker's piece from `begin` on."""
        worker, memory = self.workers[at], self.measured.memory
        end = bisect_right(self.work, self.work[begin] + limit * self.measured.speed_of(worker)) - 1
        if worker in memory:
            end = min(end, bisect_right(self.need, self.need[begin] + memory[worker]) - 1)
        return min(end, self.length - self.behind[at])


# The choice: a move must pay.


class _Option(NamedTuple):
    """Owners with their price in time; of two options the lesser one wins."""

    price: float
    moved: int
    owners: Owners
    time: float


class _Options:
    """The prices of owners."""

    def __init__(
        self,
        ownership: Ownership,
        measured: MeasuredFacts,
        whole: Mapping[int, Collection[Slot]],
        num_workers: int,
        order: ScheduleOrder,
    ):
        self.present, self.grid, self.measured = ownership.owners, ownership.grid, measured
        self.num_workers, self.order = num_workers, order
        self.times: dict[Owners, float] = {}  # several limits often give the same cut
        self.held = {worker: {self.grid.place(slot) for slot in slots} for worker, slots in whole.items()}
        for place, owner in enumerate(self.present):
            self.held.setdefault(owner, set()).add(place)

    def price(self, worker: int, place: int) -> int:
        """Returns the price of a move: the bytes that are copied, and one for a change of the owner."""
        if self.present[place] == worker:
            return 0
        return 1 if place in self.held.get(worker, ()) else 1 + self.measured.moved_bytes(place % self.grid.stages)

    def option(self, owners: Owners) -> _Option:
        """Returns the option for some owners, by a dry run."""
        if owners not in self.times:
            self.times[owners] = step_time(owners, self.grid, self.measured, self.order.schedule)
        time = self.times[owners]
        moved = sum(self.price(owner, place) for place, owner in enumerate(owners))
        num_runs, of_job = sum(map(len, runs_of(owners, self.grid))), self.order.stages_per_worker
        counted_runs = num_runs if of_job == 1 else max(num_runs, of_job * self.num_workers)
        transfers = 1 + _FURTHER_RUN * counted_runs / self.grid.pipelines
        # Nine digits: the same sum in another order is the same price.
        price = float(f"{HORIZON_STEPS * time * transfers + (self.move_time(moved) if moved else 0.0):.9g}")
        return _Option(price, moved, owners, time)

    def move_time(self, moved: int) -> float:
        """Returns the time of a hand-over; in units, to copy all replicas takes as long as a step at the best."""
        if self.measured.in_seconds:
            return self.measured.pause_s + moved / self.measured.bytes_per_s
        step = self.grid.microbatches * self.grid.stages * (UNIT_FORWARD + UNIT_BACKWARD) / self.num_workers
        return moved / sum(map(self.measured.moved_bytes, range(self.grid.stages))) * step

    def candidates(self, able: list[int]) -> list[_Option]:
        """Returns cuts; none if memory suffices for none. A slow owner with a slot can be seen to be well again."""
        order = in_order(self.present, able, self.measured)
        slow = [worker for worker in able if self.measured.speed_of(worker) < 1 and worker in self.present]
        shaped = [*self._shaped(order)]
        if self.grid.fsdp and shaped:  # else a worker has all its stages unsharded for the whole step
            return shaped
        cuts = [*self._cuts(order, ()), *shaped]
        if not cuts or {*slow} <= {*min(cuts).owners}:
            return cuts
        kept = self._cuts(order, slow)
        return kept if kept and min(kept).time <= _KEPT * min(cut.time for cut in cuts) else cuts

    def _cuts(self, order: Sequence[int], keep: Collection[int]) -> list[_Option]:
        row = _Row(self, order, keep)
        limit = row.least_limit()
        if limit is None:
            return []
        cuts = [self.option(row.cut(limit * looser)) for looser in _LOOSER]
        are_alike = len(set(map(self.measured.speed_of, order))) == 1
        return cuts if are_alike and self.grid.pipelines == 1 else [self._climbed(min(cuts)), *cuts]

    def _shaped(self, order: Sequence[int]) -> Iterator[_Option]:
        """Yields options in which the workers of each pipeline have runs as the stages of the schedule."""
        ways = directions_of(self.order.schedule)
        per_team, rest = divmod(len(order) * ways, self.grid.pipelines)
        if rest or is_in_list_order(self.order.schedule, self.grid):
            return
        measured = replace(self.measured, speed={}) if self.grid.fsdp else self.measured  # the same in all pipelines
        for stages_per_worker in range(1, self.order.stages_per_worker + 1):
            owners: list[int] = []
            for first in range(0, len(order), per_team):
                line = dealt(order[first : first + per_team], stages_per_worker, self.grid, measured, self.order)
                owners += [*line, *line[::-1]][: ways * self.grid.stages]
            ownership = Ownership(self.grid, tuple(owners))
            if owners and teams_of(self.order.schedule, ownership) and self._fits(ownership.owners):
                yield self._climbed(self.option(ownership.owners))

    def _climbed(self, best: _Option) -> _Option:
        """Returns the last of a chain of options, each better than the one before, and with one border moved by a slot.

        A cut knows nothing of the order in which runs wait for each other, which counts with unlike workers or runs.
        """
        left, shifts = _MOST_TASKS, _shifts(best.owners, self.grid)
        # The dry run of a whole program takes four times as long as that of the list scheduler.
        cost = 2 if is_in_list_order(self.order.schedule, self.grid) else 8
        while left > 0 and (owners := next(shifts, None)) is not None:
            if len({*owners}) == len({*best.owners}) and self._fits(owners) and self._stands_as(best.owners, owners):
                left -= cost * self.grid.microbatches * sum(map(len, runs_of(owners, self.grid)))
                option = self.option(owners)
                if option < best:
                    best, shifts = option, _shifts(owners, self.grid)
        return best

    def _stands_as(self, before: Owners, owners: Owners) -> bool:
        """Returns whether the schedule still orders the steps, if it did: `step_time` knows little of other orders."""
        schedule = self.order.schedule
        if is_in_list_order(schedule, self.grid) or not teams_of(schedule, Ownership(self.grid, before)):
            return True
        return bool(teams_of(schedule, Ownership(self.grid, owners)))

    def _fits(self, owners: Owners) -> bool:
        needs = Counter[int]()
        for place, owner in enumerate(owners):
            needs[owner] += self.measured.needed_bytes(place % self.grid.stages)
        return all(need <= self.measured.memory.get(owner, need) for owner, need in needs.items())


class ScheduleOrder(NamedTuple):
    """The schedule that orders the steps, and the most stages that a worker has of a pipeline."""

    schedule: str = "1f1b"
    stages_per_worker: int = 1


def dealt(
    workers: Sequence[int], stages_per_worker: int, grid: Grid, measured: MeasuredFacts, order: ScheduleOrder
) -> list[int]:
    """Returns the owners of a pipeline's slots: runs in the order of the placement; empty if there are too few slots.

    The border behind a run is the one with which its worker has most nearly its share of the work by then.
    """
    num_stages, placement = len(workers) * stages_per_worker, SCHEDULES[order.schedule].placement
    costs = [sum(each) for each in zip(measured.forwards(grid), measured.backwards(grid), strict=True)]
    work = list(accumulate(costs, initial=0.0))
    speeds = [measured.speed_of(worker) for worker in workers]
    has, owners, due = [0.0] * len(workers), list[int](), 0.0
    for stage in range(num_stages if num_stages <= grid.stages else 0):
        at, begin = worker_of(stage, len(workers), placement), len(owners)
        due += work[-1] * speeds[at] / sum(speeds) * (stage // len(workers) + 1) / stages_per_worker - has[at]
        ends = range(begin + 1, grid.stages - num_stages + stage + 2)
        end = min(ends, key=lambda border: abs(work[border] - due)) if stage + 1 < num_stages else grid.stages
        has[at] += work[end] - work[begin]
        owners += [workers[at]] * (end - begin)
    return owners


def _shifts(owners: Owners, grid: Grid) -> Iterator[Owners]:
    """Yields the owners with one border moved by a slot."""
    for one, other in (pair for line in runs_of(owners, grid) for pair in pairwise(line)):
        border = one.pipeline * grid.stages + other.first
        yield (*owners[: border - 1], other.worker, *owners[border:])
        yield (*owners[:border], one.worker, *owners[border + 1 :])


def assign(
    ownership: Ownership,
    workers: Collection[int],
    measured: MeasuredFacts | None = None,
    whole: Mapping[int, Collection[Slot]] | None = None,
    order: ScheduleOrder | None = None,
) -> Assignment:
    """Returns the wanted owners of all slots.

    `ownership` is the present one, `workers` are the members that may own, `whole` has the slots of which a worker
    holds a whole replica, beside those that it owns; without an `order` it is that of the list scheduler. Raises
    InvariantError if `workers` is empty.
    """
    ensure(len(workers) > 0, "a member may own slots")
    known, grid = measured or MeasuredFacts(), ownership.grid
    able, words = _able(sorted(workers), known, grid)
    given = whole or {}, len(able), order or ScheduleOrder()
    options = _Options(ownership, known, *given)
    cuts = options.candidates(able)
    if not cuts:
        words.append("all workers together have too little memory, so memory is ignored")
        options = _Options(ownership, replace(known, memory={}), *given)
        cuts = options.candidates(able)
    before, best = options.option(ownership.owners), min(cuts)
    stays = {*ownership.owners} <= {*able} and (
        best.price >= before.price or best.time > (1 - _LEAST_GAIN) * before.time
    )
    chosen = before if stays else best
    words.insert(0, _words_of_none(options, before, cuts) if stays else _words_of_move(options, before, best))
    return Assignment(chosen.owners, "; ".join(words), 1 - chosen.time / before.time)


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


def _words_of_none(options: _Options, before: _Option, cuts: list[_Option]) -> str:
    unit, shortest = "s" if options.measured.in_seconds else "units", min(cut.time for cut in cuts)
    words = f"nothing moves: a step is predicted to take {before.time:.4g} {unit}, and "
    if shortest >= before.time:
        return f"{words}no better cut was found"
    return f"{words}one of {shortest:.4g} {unit} would not pay for the move in {HORIZON_STEPS} steps"


def _words_of_move(options: _Options, before: _Option, best: _Option) -> str:
    """Returns the move in words: the slots, the time of a step before and after, and the steps that pay it back."""
    measured, grid, present = options.measured, options.grid, before.owners
    unit = "s" if measured.in_seconds else "units"
    changed = [place for place, (was, owner) in enumerate(zip(present, best.owners, strict=True)) if was != owner]
    numbers = Counter(place // grid.stages for place in changed)
    words = f"{counted(len(changed), grid.noun)} of {len(present)} {'moves' if len(changed) == 1 else 'move'}"
    if grid.pipelines > 1:
        words += f" ({', '.join(f'{numbers[pipeline]} of pipeline {pipeline}' for pipeline in sorted(numbers))})"
    words += f", {size_text(best.moved - len(changed))} are copied" if measured.replica_bytes else ""
    if measured.replica_bytes and measured.bytes_per_s != BYTES_PER_S:
        words += f", at {measured.bytes_per_s / 1e9:.3g} GB/s as the last ones"
    words += f": a step is predicted to take {best.time:.4g} {unit} instead of {before.time:.4g}"
    gone, new = sorted({*present} - {*best.owners}), sorted({*best.owners} - {*present})
    if not gone:
        steps = math.ceil(options.move_time(best.moved) / (before.time - best.time))
        words += f", which pays in {counted(steps, 'step')}"
    if gone:
        words += f"; {numbered('worker', gone)} {'owns' if len(gone) == 1 else 'own'} none any more"
    if new:
        words += f"; {numbered('worker', new)} {'is a new owner' if len(new) == 1 else 'are new owners'}"
    return words
