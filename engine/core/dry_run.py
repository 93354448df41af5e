"""The dry run: walks a program with a virtual clock, without a process.

Each worker runs its actions in order, one at a time; an action starts when its worker is free and everything it
requires is finished. Sends do not block; a receive holds its worker until the transfer has arrived. What cannot
finish comes back as the cycle of actions that wait for each other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from engine.core.action import COMPUTE_OPS, Action, Op
from engine.core.errors import DeadlockError, ScheduleError
from engine.core.ownership import Ownership
from engine.core.program import Program
from engine.core.requires import Need, rendezvous, requires

Cost = Callable[[Action], float]


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one worker, from `start` to `end`, in the unit of the costs."""

    start: float
    end: float
    worker: int
    action: Action


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a program would do: its spans in order of start, its length, idle share and stashed residuals."""

    spans: tuple[Span, ...]
    makespan: float
    bubble: float
    peak_stash: dict[int, int]


def unit_costs(action: Action) -> float:
    """Costs a forward 1, a backward 2, everything else nothing: the usual picture of a schedule."""
    return {Op.F: 1.0, Op.B: 2.0}.get(action.op, 0.0)


def dry_run(program: Program, ownership: Ownership, cost: Cost = unit_costs) -> DryRun:
    """Returns the predicted run of `program`; raises DeadlockError with the cycle, ScheduleError for a gap."""
    walk = _Walk(program, ownership, cost)
    ready = deque(program)
    while ready:
        worker = ready.popleft()
        while walk.advance(worker):
            ready.extend(walk.released())
    walk.refuse_unfinished()
    spans = tuple(sorted(walk.spans, key=lambda span: (span.start, span.worker, span.end)))
    makespan = max((span.end for span in spans), default=0.0)
    busy = sum(span.end - span.start for span in spans if span.action.op in COMPUTE_OPS)
    bubble = 1.0 - busy / (makespan * len(program)) if makespan else 0.0
    return DryRun(spans, makespan, bubble, {worker: peak_stash(actions) for worker, actions in program.items()})


def peak_stash(actions: tuple[Action, ...]) -> int:
    """Returns the most residuals that a worker holds at once: forwards run whose backward has not."""
    held = peak = 0
    for action in actions:
        held += (action.op is Op.F) - (action.op is Op.B)
        peak = max(peak, held)
    return peak


class _Walk:
    """The state of one dry run: where each worker is, what is finished and when, who waits for what."""

    def __init__(self, program: Program, ownership: Ownership, cost: Cost):
        self.program = program
        self.ownership = ownership
        self.cost = cost
        self.cursor = dict.fromkeys(program, 0)
        self.free_at = dict.fromkeys(program, 0.0)
        self.finished: dict[Need, float] = {}
        self.begun: dict[Need, float] = {}
        self.waiting: dict[Need, list[int]] = {}
        self.wake: list[int] = []
        self.spans: list[Span] = []

    def head(self, worker: int) -> Action | None:
        """Returns the action that `worker` is at, or None behind its last."""
        actions = self.program[worker]
        return actions[self.cursor[worker]] if self.cursor[worker] < len(actions) else None

    def missing(self, worker: int, action: Action) -> Need | None:
        """Returns the first thing that `action` waits for, or None when it may run."""
        for need in requires(action, worker, self.ownership):
            if need not in self.finished:
                return need
        for need in rendezvous(action, self.ownership):
            if need not in self.begun:
                return need
        return None

    def advance(self, worker: int) -> bool:
        """Runs the head of `worker` if it may run; else notes what it waits for."""
        action = self.head(worker)
        if action is None:
            return False
        needs = requires(action, worker, self.ownership)
        if all(need in self.finished for need in needs):
            at = max([self.free_at[worker], *(self.finished[need] for need in needs)])
            self._mark(self.begun, (worker, action), at)
        missing = self.missing(worker, action)
        if missing is not None:
            self.waiting.setdefault(missing, []).append(worker)
            return False
        start = max([self.begun[worker, action], *(self.begun[each] for each in rendezvous(action, self.ownership))])
        end = start + self.cost(action)
        self.spans.append(Span(start, end, worker, action))
        self.free_at[worker] = end
        self.cursor[worker] += 1
        self._mark(self.finished, (worker, action), end)
        return True

    def _mark(self, what: dict[Need, float], need: Need, at: float) -> None:
        if need not in what:
            what[need] = at
            self.wake += self.waiting.pop(need, [])

    def released(self) -> list[int]:
        """Returns the workers that something finished or begun since the last call has released."""
        wake, self.wake = self.wake, []
        return wake

    def refuse_unfinished(self) -> None:
        """Raises when a worker has not come to its end: ScheduleError if nobody does what it needs, else the cycle."""
        stuck = [worker for worker in self.program if self.head(worker) is not None]
        if not stuck:
            return
        path: list[int] = []
        worker = stuck[0]
        while worker not in path:
            path.append(worker)
            action = self.head(worker)
            assert action is not None
            need = self.missing(worker, action)
            assert need is not None
            if need[0] not in self.program or need[1] not in self.program[need[0]][self.cursor[need[0]] :]:
                raise ScheduleError(
                    f"worker {worker}, position {self.cursor[worker]}: {action} requires {need[1]} "
                    f"on worker {need[0]}, which is not in its program"
                )
            worker = need[0]
        cycle = [*path[path.index(worker) :], worker]
        raise DeadlockError(tuple((each, str(self.head(each))) for each in cycle))
