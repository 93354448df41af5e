"""The dry run: walks a program with a virtual clock, without a process.

Each worker runs its actions in order, one at a time; copies to the host and back run beside them. An action starts when
its worker is free and every value that it needs is there. The values that it makes are there when it ends, a sent value
a latency later; values that are held at the start are there at once. Sends do not block. A receive holds its worker
until the transfer has arrived. A program that cannot end raises the cycle of actions that wait for each other.

    worker 0   0F0 0F1         0B0     .   0B1           1F1B of 2 stages and 2 microbatches: makespan 9,
    worker 1       1F0 1B0     1F1 1B1                   idle share 1/3; worker 0 waits 3 between its actions
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat
from math import inf
from operator import itemgetter
from typing import NamedTuple

from engine.core.action import ADDING_OPS, COMPUTE_OPS, FORWARD_OPS, LEAVE_OPS, SEND_OPS, STASH_OPS, Action, Op, Program
from engine.core.errors import DeadlockError, ScheduleError
from engine.core.ownership import Ownership, turned
from engine.core.program.dependencies import DependencyIndex, IndexedActions
from engine.core.program.schedules import COSTS, overlapped_costs
from engine.core.value import WIRE, Held, Kind, Value

Cost = Callable[[Action], float]
_NEVER = inf
_FEW = 16  # values that an action needs; more are votes, for which all workers wait
_STASHING = FORWARD_OPS | (STASH_OPS - LEAVE_OPS)
_OF_PARTS = {Op.W, Op.OFFLOAD_W, Op.RELOAD_W}


class Span(NamedTuple):
    """One action of one worker, from `start` to `end`, in the unit of the costs."""

    start: float
    end: float
    worker: int
    action: Action


@dataclass(frozen=True, slots=True)
class DryRun:
    """The predicted run: spans by start, length, idle share, and each worker's peak stash and waits in between."""

    spans: tuple[Span, ...]
    makespan: float
    bubble: float
    peak_stash: dict[int, int]
    waits: dict[int, float] = field(default_factory=dict)


def unit_costs(action: Action) -> float:
    """Costs a forward 1, a backward 2, half of one 1, everything else nothing: the usual picture of a schedule."""
    return COSTS.get(action.op, 0.0)


def dry_run(
    program: Program,
    ownership: Ownership,
    cost: Cost = unit_costs,
    held: Collection[Held] = (),
    overlapping: bool = False,
    latency: float = 0.0,
) -> DryRun:
    """Returns the predicted run of `program`; raises DeadlockError with the cycle, ScheduleError for a gap.

    `held` are the values at the start. An `overlapping` pair takes as long as its longer action. A sent value arrives
    `latency` after its SEND.
    """
    costs_of = overlapped_costs if overlapping else map
    costs = {worker: list(costs_of(cost, actions)) for worker, actions in program.items()}
    walk = _Walk(program, ownership, held, latency)
    walk.run(costs)
    lines = {
        worker: [
            Span(start, start + cost, worker, action)
            for start, cost, action in zip(walk.starts[worker], costs[worker], program[worker], strict=True)
        ]
        for worker in sorted(program)
    }
    # By start, then by worker, then by position.
    spans = tuple(sorted(chain.from_iterable(lines.values()), key=itemgetter(0)))
    makespan = max((line[-1].end for line in lines.values() if line), default=0.0)
    busy = sum(end - start for start, end, _, action in spans if action.op in COMPUTE_OPS)
    bubble = 1.0 - busy / (makespan * len(program)) if makespan else 0.0
    stashed = Counter(worker for worker, value in held if value.kind is Kind.RESIDUAL)
    peaks = {worker: peak_stash(actions, stashed[worker]) for worker, actions in program.items()}
    return DryRun(spans, makespan, bubble, peaks, {worker: _waits(line) for worker, line in lines.items()})


def starts_of(program: Program, ownership: Ownership) -> dict[int, array[float]]:
    """Returns when each action of each worker starts in the dry run with unit costs: of a million actions, 8 MB."""
    walk = _Walk(program, ownership, ())
    walk.run({worker: [COSTS.get(op, 0.0) for _, op, _, _ in actions] for worker, actions in program.items()})
    return {worker: array("d", starts) for worker, starts in walk.starts.items()}


def makespan_of(
    program: Program, ownership: Ownership, costs: Mapping[int, Sequence[float]], held: Collection[Held] = ()
) -> float:
    """Returns the time of a dry run in which the actions of each worker have these costs."""
    walk = _Walk(program, ownership, held)
    walk.run(costs)
    ends = (start + cost for each in program for start, cost in zip(walk.starts[each], costs[each], strict=True))
    return max(ends, default=0.0)


def refuse_stuck(program: Program, ownership: Ownership, held: Collection[Held] = ()) -> None:
    """Raises DeadlockError or ScheduleError as `dry_run` does, without a timeline."""
    _Walk(program, ownership, held).run(dict.fromkeys(program, repeat(0.0)))


def _waits(spans: list[Span]) -> float:
    compute = [(start, end) for start, end, _, action in spans if action.op in COMPUTE_OPS]
    return compute[-1][1] - compute[0][0] - sum(end - start for start, end in compute) if compute else 0.0


def peak_stash(actions: tuple[Action, ...], stashed: int = 0) -> int:
    """Returns the most residuals that a worker holds at once, of `stashed` at the start."""
    return max(chain((stashed,), stash_after(actions, stashed)))


def stash_after(actions: Sequence[Action], stashed: int = 0) -> Iterator[int]:
    """Yields how many residuals a worker holds after each of its actions, of `stashed` at the start.

    A forward makes one, and its backward, or the part for the weights, frees it. Those of redundant forwards stay to
    the end. One on its way to the host does not count: what takes its place waits for the copy.
    """
    in_parts = _in_parts(actions)
    for stage, op, microbatch, pipeline in actions:
        if op in _STASHING:
            stashed += 1
        elif op in LEAVE_OPS or op in ADDING_OPS or (op is Op.I and (pipeline, stage, microbatch) not in in_parts):
            stashed -= 1
        yield stashed


def _in_parts(actions: Sequence[Action]) -> set[tuple[int, int, int]]:
    return {(action.pipeline, action.stage, action.microbatch) for action in actions if action.op is Op.W}


def stash_of(action: Action, slices: int = 1) -> Value:
    """Returns what an action stashes, copies or uses: a residual, or what is left of it for the weights."""
    stage, op, microbatch, pipeline = action
    if op in _OF_PARTS:
        return Value(Kind.PENDING, pipeline, stage, microbatch)
    turns = slices > 1 and (op is Op.B or op is Op.I)
    return Value(Kind.RESIDUAL, pipeline, stage, turned(microbatch, slices) if turns else microbatch)


class HostLink:
    """The link of one worker to its host: one copy of a residual at a time in each direction, in order.

    A forward or RELOAD waits for copies until it fits under the peak that `peak_stash` finds, with `stashed` residuals
    at the start; a backward waits for its own copy back.
    """

    def __init__(self, actions: Sequence[Action], stashed: int = 0, slices: int = 1):
        self._in_parts, self._slices = _in_parts(actions), slices
        self._most, self._here = peak_stash(tuple(actions), stashed), stashed
        self._leaving: deque[float] = deque()  # when they will have left
        self._left: dict[Value, float] = {}
        self._back: dict[Value, float] = {}
        self._out_free = self._in_free = 0.0

    def start(self, action: Action, ready: float, copy: float) -> float:
        """Returns when an action starts that is next and could at `ready`; a copy takes `copy`."""
        stage, op, microbatch, pipeline = action
        if op in _STASHING:
            while self._here >= self._most and self._leaving:
                ready = max(ready, self._leaving.popleft())
                self._here -= 1
            self._here += 1
        if op in LEAVE_OPS:
            self._out_free = self._left[stash_of(action)] = max(self._out_free, ready) + copy
            self._leaving.append(self._out_free)
        elif op in STASH_OPS:
            there = max(self._in_free, ready, self._left.get(stash_of(action), 0.0))
            self._in_free = self._back[stash_of(action)] = there + copy
        elif op in ADDING_OPS or op is Op.I:
            ready = max(ready, self._back.pop(stash_of(action, self._slices), 0.0))
            self._here -= op in ADDING_OPS or (pipeline, stage, microbatch) not in self._in_parts
        return ready


class _Walk:
    """The state of one walk over a program: position of each worker, time of each value, waiting workers by value."""

    def __init__(self, program: Program, ownership: Ownership, held: Collection[Held], latency: float = 0.0):
        self.program = program
        self.latency = latency
        self.stashed = Counter(worker for worker, value in held if value.kind is Kind.RESIDUAL)
        self.numbers = DependencyIndex(program, ownership)
        self.slices = ownership.grid.slices
        self.there: list[float] = []  # by number
        for thing in held:
            number = self.numbers.of(thing)
            self._make_room()
            self.there[number] = 0.0
        self.starts: dict[int, list[float]] = {worker: [] for worker in program}
        self.waiting: dict[int, list[int]] = {}  # number -> workers
        # Of the votes that a line needs: how many are known to be there, and the time of the last of them.
        self.seen: dict[tuple[int, int], tuple[Sequence[int], list[float]]] = {}
        self.ready = deque(program)

    def _make_room(self) -> None:
        self.there += [_NEVER] * (len(self.numbers) - len(self.there))

    def run(self, costs: Mapping[int, Iterable[float]]) -> None:
        lines = {worker: self._goes(worker, costs[worker]) for worker in self.program}
        while self.ready:
            worker = self.ready.popleft()
            missing = next(lines[worker], None)
            if missing is not None:
                self.waiting.setdefault(missing, []).append(worker)
        if self.waiting:
            self._refuse({worker: number for number, workers in self.waiting.items() for worker in workers})

    def _goes(self, worker: int, costs: Iterable[float]) -> Iterator[int]:
        """Runs one worker to its end; yields the number of each missing value, and continues when resumed."""
        there, starts, waiting = self.there, self.starts[worker], self.waiting
        lines: dict[tuple[int, Op, int, int], IndexedActions] = {}
        slices = self.slices
        free_at, latency, actions = 0.0, self.latency, self.program[worker]
        link = HostLink(actions, self.stashed[worker], slices) if STASH_OPS & {each.op for each in actions} else None
        for action, cost in zip(actions, costs, strict=False):
            stage, op, microbatch, pipeline = action
            key = stage, op, microbatch % slices if microbatch else -1, pipeline  # as `line_number`, without a call
            line = lines.get(key)
            if line is None:
                line = lines[key] = self.numbers.line(action, worker)
                self._make_room()
            needed, begun, met, made = line
            start = free_at
            if len(needed) > _FEW:
                start = yield from self._all_votes(needed, microbatch, free_at)
            else:
                for number in needed:
                    at = there[number + microbatch]
                    if at > start:  # noqa: PLR1730 - max() would take longer than all the rest of the line
                        start = at
            if start == _NEVER:
                start = yield from self._all_there(needed, microbatch, free_at)
            if met:
                self._put(begun, microbatch, start)
                start = yield from self._all_there(met, microbatch, start)
            if link is not None:
                start = link.start(action, start, cost)
                cost = 0.0 if op in STASH_OPS else cost  # noqa: PLW2901 - the link is busy, not the worker
            free_at = start + cost if cost else start  # the same number, not a new one for each of a million
            starts.append(start)
            at = free_at + latency if latency and op in SEND_OPS else free_at
            for number in made:  # as `_put` does, without a million calls
                place = number + microbatch
                if there[place] == _NEVER:
                    there[place] = at
                    if place in waiting:
                        self.ready += waiting.pop(place)

    def _all_votes(self, votes: Sequence[int], microbatch: int, start: float) -> Generator[int, None, float]:
        """Waits for values that every worker waits for; together they look at each of them once."""
        _, seen = self.seen.setdefault((id(votes), microbatch), (votes, [0.0, 0.0]))
        while (place := int(seen[0])) < len(votes):
            number = votes[place] + microbatch
            if self.there[number] == _NEVER:
                yield number
            else:
                seen[:] = place + 1, max(seen[1], self.there[number])
        return max(start, seen[1])

    def _all_there(self, numbers: Sequence[int], microbatch: int, start: float) -> Generator[int, None, float]:
        for number in numbers:
            while self.there[number + microbatch] == _NEVER:
                yield number + microbatch
            start = max(start, self.there[number + microbatch])
        return start

    def _put(self, numbers: Sequence[int], microbatch: int, at: float) -> None:
        there = self.there
        for number in numbers:
            made = number + microbatch
            if there[made] == _NEVER:  # a value that is there keeps its time
                there[made] = at
                if made in self.waiting:
                    self.ready += self.waiting.pop(made)

    def _refuse(self, waits_for: Mapping[int, int]) -> None:
        """Raises ScheduleError if no worker makes a value that another waits for, else the cycle."""
        left = {worker: actions[len(self.starts[worker]) :] for worker, actions in self.program.items()}
        comes_from: dict[int, int] = {}
        for worker, actions in left.items():
            for action in actions:
                line = self.numbers.line(action, worker)
                for number in (*line.begins, *line.makes):
                    comes_from.setdefault(number + action.microbatch, worker)
        path: list[int] = []
        worker = next(each for each in self.program if each in waits_for)
        while worker not in path:
            path.append(worker)
            missing = waits_for[worker]
            if missing not in comes_from:
                place, thing = self.numbers.thing(missing)
                where = "on the wire" if place == WIRE else f"at worker {place}"
                raise ScheduleError(
                    f"worker {worker}, position {len(self.starts[worker])}: {left[worker][0]} needs {thing} {where}, "
                    "which nobody makes"
                )
            worker = comes_from[missing]
        cycle = [*path[path.index(worker) :], worker]
        raise DeadlockError(tuple((each, str(left[each][0])) for each in cycle))


def bubbles(run: DryRun) -> dict[int, float]:
    """Returns for each worker the share of the dry run in which it does not compute."""
    busy = dict.fromkeys(run.peak_stash, 0.0)
    for start, end, worker, action in run.spans:
        if action.op in COMPUTE_OPS:
            busy[worker] += end - start
    return {worker: 1.0 - taken / run.makespan if run.makespan else 0.0 for worker, taken in busy.items()}


# Text grids with a row per worker: of a dry run, a cell per unit of time; of a broken program, a cell per action.
def grid_lines(run: DryRun, width: int = 0, ownership: Ownership | None = None) -> list[str]:
    """Returns the compute actions of `run`, which has integer costs, in blocks of at most `width` columns (0: any).

    A cell shows an action where it starts, `-` while it runs, and nothing while the worker waits. An action on a slot
    that its worker does not own by `ownership` stands in brackets.
    """
    num_units = round(run.makespan)
    workers = sorted({span.worker for span in run.spans})
    cells = {worker: [""] * num_units for worker in workers}
    for span in run.spans:
        if span.action.op in COMPUTE_OPS:
            first, last = round(span.start), round(span.end)
            owned = ownership is None or ownership.owner(span.action.pipeline, span.action.stage) == span.worker
            text = str(span.action) if owned else f"({span.action})"
            cells[span.worker][first:last] = [text, *["-"] * (last - first - 1)]
    cell_width = max((len(cell) for row in cells.values() for cell in row), default=1) + 1
    label_width = len("worker ") + max(len(str(worker)) for worker in workers)
    units_per_block = max(1, (width - label_width - 2) // cell_width) if width else num_units
    lines: list[str] = []
    for first in range(0, num_units, units_per_block):
        if first:
            lines.append("")
        for worker in workers:
            block = cells[worker][first : first + units_per_block]
            row = "".join(f"{cell:<{cell_width}}" for cell in block)
            lines.append(f"{'worker ' + str(worker):<{label_width}}  {row}".rstrip())
    return lines


_BEFORE_THE_FIRST = 3  # columns


def marked_lines(
    program: Mapping[int, tuple[Action, ...]], marked: Collection[tuple[int, int]], width: int
) -> list[str]:
    """Returns rows of a program from shortly before the first of `marked`, (worker, position); > < enclose these."""
    start = max(0, min(position for _, position in marked) - _BEFORE_THE_FIRST)
    rows = {
        f"worker {worker}": [
            f">{action}<" if (worker, start + place) in marked else str(action)
            for place, action in enumerate(actions[start : start + width])
        ]
        for worker, actions in program.items()
    }
    label_width = max(map(len, rows)) + 2
    cell_width = max(len(cell) for row in rows.values() for cell in row) + 1
    columns = max(1, (width - label_width) // cell_width)
    return [
        f"{label:<{label_width}}{''.join(f'{cell:<{cell_width}}' for cell in row[:columns])}".rstrip()
        for label, row in rows.items()
    ]
