"""List scheduling: from tasks and their predecessors to an order on each worker.

The forwards of a slot run in microbatch order, and so do its backwards. A forward of microbatch m waits for the
backward of ``m - (P - stage)``, so a slot keeps no more residuals than under 1F1B. This cannot deadlock: a microbatch
waits for itself and for earlier ones only. A free worker takes its best ready task: forwards first, then by microbatch,
then later stages first. With that limit, forwards first *is* 1F1B on a worker with one slot:

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

from engine.core.action import FORWARD_OPS, OP_TABLE, Action, Op
from engine.core.errors import ensure
from engine.core.op_row import Work
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import makes
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
    """Returns the tasks of each owner in order; `tasks` gives for each the values that another task must make first.

    A ready task of `first` comes before a ready task outside it.
    """
    order = sorted(tasks, key=lambda action: (action not in first, _priority(action)))
    workers = [ownership.owner(action.pipeline, action.stage) for action in order]
    program: dict[int, list[Action]] = {worker: [] for worker in sorted(set(workers))}
    started, _ = starts(workers, [COSTS[action.op] for action in order], _predecessors(order, tasks, ownership))
    for number in started:
        program[workers[number]].append(order[number])
    return {worker: tuple(actions) for worker, actions in program.items()}


def _priority(action: Action) -> tuple[bool, int, int, int, Op]:
    stage, op, microbatch, pipeline = action
    return op not in FORWARD_OPS, microbatch, -stage, pipeline, op


def _predecessors(order: Sequence[Action], tasks: Tasks, ownership: Ownership) -> list[list[int]]:
    """Returns for each task the numbers of the tasks that must end before it starts."""
    maker = {
        value: number
        for number, action in enumerate(order)
        for _, value in makes(action, ownership.owner(action.pipeline, action.stage), ownership)
    }
    lists: tuple[dict[Slot, list[int]], dict[Slot, list[int]]] = ({}, {})
    found = [[maker[value] for _, value in tasks[action] if value in maker] for action in order]
    for number in sorted(range(len(order)), key=lambda number: order[number].microbatch):
        action = order[number]
        ahead = lists[action.op in FORWARD_OPS].setdefault((action.pipeline, action.stage), [])
        if ahead:
            found[number].append(ahead[-1])
        ahead.append(number)
    backwards, forwards = lists
    for slot, numbers in forwards.items():
        following = backwards.get(slot, [])
        microbatches = [order[number].microbatch for number in following]
        for number in numbers:
            before = bisect_right(microbatches, order[number].microbatch - (ownership.grid.stages - slot[1]))
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
