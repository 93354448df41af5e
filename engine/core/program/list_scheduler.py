"""List scheduling: from tasks and their predecessors to an order on each worker.

The forwards of a slot run in microbatch order, and so do its backwards. A forward of microbatch m waits for the
backward of m - w, so a slot keeps the residuals of w microbatches. This cannot deadlock: a microbatch waits for itself
and for earlier ones only. The window w counts runs, from the slot to the end of its pipeline; a run is the consecutive
slots of one owner. So equal runs take the time of 1F1B with one slot each, and keep as much. A run that is twice as
long as another one would wait while the pipeline fills. So there windows are one more, up to the number of shortest
runs that the slots to the end would make.

A free worker takes its best ready task: forwards first, then by microbatch, then later stages first. With that limit,
forwards first *is* 1F1B on a worker with one slot:

    stage 0   F0 F1 F2 .  .  B0 F3 B1 ...
    stage 1   .  F0 F1 .  B0 F2 B1 ...
    stage 2   .  .  F0 B0 F1 B1 ...

Backwards first would drain the pipeline through a worker with two slots, which then waits while it fills again. The
order of each worker is taken from one valid run, so workers never wait for each other in a circle.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from heapq import heappop, heappush
from itertools import groupby

from engine.core.action import FORWARD_OPS, OP_TABLE, Action, Op
from engine.core.errors import ensure
from engine.core.op_row import Work
from engine.core.ownership import Ownership, Slot
from engine.core.program.remaining_tasks import Tasks, tasks_left


def op_costs(forward: float = 1, backward: float = 2, weights: float = 1) -> dict[Op, float]:
    """Returns the cost of each op that computes; `weights` is the part of a backward for the weights."""
    costs = {
        Work.FORWARD: forward,
        Work.BACKWARD: backward,
        Work.FOR_INPUT: backward - weights,
        Work.FOR_WEIGHTS: weights,
    }
    return {op: costs[row.work] for op, row in OP_TABLE.items() if row.work}


COSTS = op_costs()


def merged_compute(ownership: Ownership) -> dict[int, tuple[Action, ...]]:
    """Returns the compute actions of a whole step in list order; workers may own several slots."""
    return list_schedule(tasks_left(ownership), ownership)


def list_schedule(
    tasks: Tasks, ownership: Ownership, first: Collection[Action] = frozenset()
) -> dict[int, tuple[Action, ...]]:
    """Returns the tasks of each owner in order; `tasks` gives for each the tasks that make what it needs.

    A ready task of `first` comes before a ready task outside it.
    """
    order = sorted(tasks, key=lambda action: (action not in first, _priority(action)))
    owners = {slot: ownership.owner(*slot) for slot in ownership.grid.slots()}
    workers = [owners[pipeline, stage] for stage, _, _, pipeline in order]
    program: dict[int, list[Action]] = {worker: [] for worker in sorted(set(workers))}
    started, _ = starts(workers, [COSTS[action.op] for action in order], _predecessors(order, tasks, ownership))
    for number in started:
        program[workers[number]].append(order[number])
    return {worker: tuple(actions) for worker, actions in program.items()}


def _priority(action: Action) -> tuple[bool, int, int, int, Op]:
    stage, op, microbatch, pipeline = action
    return op not in FORWARD_OPS, microbatch, -stage, pipeline, op


def in_flight(ownership: Ownership) -> dict[Slot, int]:
    """Returns for each slot how many microbatches may be between their forward and their backward on it."""
    stages, found = ownership.grid.stages, {}
    for pipeline in range(ownership.grid.pipelines):
        owners = ownership.owners[pipeline * stages : (pipeline + 1) * stages]
        lengths = [len(tuple(run)) for _, run in groupby(owners)]
        shortest, first = min(lengths), 0
        more = max(lengths) >= 2 * shortest
        for number, length in enumerate(lengths):
            for stage in range(first, first + length):
                found[pipeline, stage] = min(len(lengths) - number + more, -(-(stages - stage) // shortest))
            first += length
    return found


def _predecessors(order: Sequence[Action], tasks: Tasks, ownership: Ownership) -> list[list[int]]:
    """Returns for each task the numbers of the tasks that must end before it starts."""
    number_of = {action: number for number, action in enumerate(order)}
    found = [[number_of[each] for each in tasks[action]] for action in order]
    forwards: dict[Slot, list[int]] = {}
    backwards: dict[Slot, list[int]] = {}
    for number in sorted(range(len(order)), key=[action.microbatch for action in order].__getitem__):
        stage, op, _, pipeline = order[number]
        ahead = (forwards if op in FORWARD_OPS else backwards).setdefault((pipeline, stage), [])
        if ahead:
            found[number].append(ahead[-1])
        ahead.append(number)
    windows = in_flight(ownership)
    for slot, numbers in forwards.items():
        following = backwards.get(slot, [])
        microbatches = [order[number].microbatch for number in following]
        for number in numbers:
            before = bisect_right(microbatches, order[number].microbatch - windows[slot])
            if before:
                found[number].append(following[before - 1])
    return found


def starts(
    workers: Sequence[int], costs: Sequence[float], predecessors: Sequence[Collection[int]]
) -> tuple[list[int], float]:
    """Returns the tasks in the order of their starts, and the time at which the last one ends.

    A free worker takes its ready task with the lowest number.
    """
    successors: list[list[int]] = [[] for _ in workers]
    missing = [len(each) for each in predecessors]
    for number, each in enumerate(predecessors):
        for before in each:
            successors[before].append(number)
    ready: dict[int, list[int]] = {worker: [] for worker in sorted(set(workers))}
    for number, count in enumerate(missing):
        if count == 0:
            ready[workers[number]].append(number)  # in order, so already a heap
    started: list[int] = []
    running: list[tuple[float, int]] = []  # (end, task)
    free = dict.fromkeys(ready, True)
    now, touched = 0.0, list(ready)
    while True:
        for worker in touched:
            if free[worker] and ready[worker]:
                number = heappop(ready[worker])
                heappush(running, (now + costs[number], number))
                started.append(number)
                free[worker] = False
        if not running:
            break
        now, touched = running[0][0], []
        while running and running[0][0] == now:
            _, ended = heappop(running)
            free[workers[ended]] = True
            touched.append(workers[ended])
            for number in successors[ended]:
                missing[number] -= 1
                if missing[number] == 0:
                    heappush(ready[workers[number]], number)
                    touched.append(workers[number])
    ensure(len(started) == len(workers), "tasks wait for each other in a circle")
    return started, now
