"""The dry run: walks a program with a virtual clock, without a process.

Each worker runs its actions in order, one at a time; an action starts when its worker is free and every value that it
needs is there. What it makes is there when it ends; what is held at the start is there at once. Sends do not block; a
receive holds its worker until the transfer has arrived. What cannot finish comes back as the cycle of actions that
wait for each other.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from engine.core.action import COMPUTE_OPS, FORWARD_OPS, Action, Op
from engine.core.errors import DeadlockError, ScheduleError
from engine.core.ownership import Ownership
from engine.core.program import Program
from engine.core.requires import WIRE, Held, Kind, Value, makes, needs, rendezvous

Cost = Callable[[Action], float]
_Begun = tuple[int, Action]  # worker, and an action that waits for those that run together with it


class Span(NamedTuple):
    """One action of one worker, from `start` to `end`, in the unit of the costs."""

    start: float
    end: float
    worker: int
    action: Action


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a program would do: its spans in order of start, its length, idle share and stashed residuals.

    `waits` is how long each worker waits between its first compute action and its last.
    """

    spans: tuple[Span, ...]
    makespan: float
    bubble: float
    peak_stash: dict[int, int]
    waits: dict[int, float] = field(default_factory=dict)


def unit_costs(action: Action) -> float:
    """Costs a forward 1, a backward 2, half of one 1, everything else nothing: the usual picture of a schedule."""
    return _UNITS.get(action.op, 0.0)


_UNITS = {Op.F: 1.0, Op.REDO_F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0}


def dry_run(program: Program, ownership: Ownership, cost: Cost = unit_costs, held: Collection[Held] = ()) -> DryRun:
    """Returns the predicted run of `program`; raises DeadlockError with the cycle, ScheduleError for a gap.

    `held` is what is there at the start.
    """
    walk = _Walk(program, ownership, cost, held)
    walk.run()
    walk.refuse_unfinished()
    # By start; of those that start together by worker, and as they stand in its program.
    spans = tuple(sorted(chain.from_iterable(walk.spans[worker] for worker in sorted(program)), key=itemgetter(0)))
    makespan = max(walk.free_at.values(), default=0.0)
    busy = sum(end - start for start, end, _, action in spans if action.op in COMPUTE_OPS)
    bubble = 1.0 - busy / (makespan * len(program)) if makespan else 0.0
    stashed = Counter(worker for worker, value in held if value.kind is Kind.RESIDUAL)
    peaks = {worker: peak_stash(actions, stashed[worker]) for worker, actions in program.items()}
    return DryRun(spans, makespan, bubble, peaks, {worker: _waits(line) for worker, line in walk.spans.items()})


def _waits(spans: list[Span]) -> float:
    compute = [(start, end) for start, end, _, action in spans if action.op in COMPUTE_OPS]
    return compute[-1][1] - compute[0][0] - sum(end - start for start, end in compute) if compute else 0.0


def peak_stash(actions: tuple[Action, ...], stashed: int = 0) -> int:
    """Returns the most residuals that a worker holds at once, of `stashed` at the start.

    A forward makes one, the backward of its slot frees it: the part for the weights where the two are split. Those of
    redundant forwards have no backward there: they stay to the end.
    """
    peak = stashed
    in_parts = {(action.pipeline, action.stage, action.microbatch) for action in actions if action.op is Op.W}
    for stage, op, microbatch, pipeline in actions:
        if op in FORWARD_OPS:
            stashed += 1
            peak = max(peak, stashed)
        elif op in (Op.B, Op.W) or (op is Op.I and (pipeline, stage, microbatch) not in in_parts):
            stashed -= 1
    return peak


class _Walk:
    """The state of one dry run: where each worker is, what is there since when, who waits for what."""

    def __init__(self, program: Program, ownership: Ownership, cost: Cost, held: Collection[Held]):
        self.program = program
        self.ownership = ownership
        self.cost = cost
        self.cursor = dict.fromkeys(program, 0)
        self.free_at = dict.fromkeys(program, 0.0)
        self.there: dict[int, dict[Value, float]] = {place: {} for place in (WIRE, *program)}
        for place, value in held:
            self.there.setdefault(place, {})[value] = 0.0
        self.begun: dict[_Begun, float] = {}
        self.waiting: dict[Held | _Begun, list[int]] = {}
        self.ready = deque(program)
        self.spans: dict[int, list[Span]] = {worker: [] for worker in program}

    def run(self) -> None:
        """Runs every worker as far as it comes."""
        while self.ready:
            self._advance(self.ready.popleft())

    def _advance(self, worker: int) -> None:
        """Runs one worker until its program ends or something is missing, and notes what."""
        actions, ownership, cost = self.program[worker], self.ownership, self.cost
        there, spans, waiting = self.there, self.spans[worker], self.waiting
        position, free_at = self.cursor[worker], self.free_at[worker]
        missing: Held | _Begun | None = None
        while position < len(actions):
            action = actions[position]
            start = free_at
            for need in needs(action, worker, ownership):
                at = there[need[0]].get(need[1])
                if at is None:
                    missing = need
                    break
                if at > start:  # noqa: PLR1730 - max() would take longer than all the rest of the line
                    start = at
            if missing is None and action.op is Op.REDUCE_GRAD:
                start, missing = self._meet(worker, action, start)
            if missing is not None:
                waiting.setdefault(missing, []).append(worker)
                break
            free_at = start + cost(action)
            spans.append(Span(start, free_at, worker, action))
            position += 1
            for made in makes(action, worker, ownership):
                there[made[0]].setdefault(made[1], free_at)
                if made in waiting:
                    self.ready += waiting.pop(made)
        self.cursor[worker], self.free_at[worker] = position, free_at

    def _meet(self, worker: int, action: Action, at: float) -> tuple[float, _Begun | None]:
        """Returns when an action starts together with those of other workers, and which has not begun, if any."""
        if (worker, action) not in self.begun:
            self.begun[worker, action] = at
            self.ready += self.waiting.pop((worker, action), ())
        others = rendezvous(action, worker, self.ownership)
        missing = next((other for other in others if other not in self.begun), None)
        return max([at, *(self.begun.get(other, at) for other in others)]), missing

    def refuse_unfinished(self) -> None:
        """Raises when a worker has not come to its end: ScheduleError if nobody does what it needs, else the cycle."""
        left = {worker: actions[self.cursor[worker] :] for worker, actions in self.program.items()}
        waits_for = {worker: what for what, waiting in self.waiting.items() for worker in waiting}
        if not waits_for:
            return
        comes_from: dict[Held | _Begun, int] = {}
        for worker, actions in left.items():
            for action in actions:
                comes_from.setdefault((worker, action), worker)
                comes_from |= {made: worker for made in makes(action, worker, self.ownership) if made not in comes_from}
        path: list[int] = []
        worker = next(each for each in self.program if each in waits_for)
        while worker not in path:
            path.append(worker)
            what = waits_for[worker]
            if what not in comes_from:
                place = "on the wire" if what[0] == WIRE else f"at worker {what[0]}"
                raise ScheduleError(
                    f"worker {worker}, position {self.cursor[worker]}: {left[worker][0]} needs {what[1]} {place}, "
                    "which nobody makes"
                )
            worker = comes_from[what]
        cycle = [*path[path.index(worker) :], worker]
        raise DeadlockError(tuple((each, str(left[each][0])) for each in cycle))
