"""Lineage: from the values that workers hold to the tasks that are left of a step, backwards from missing values.

The goal is that every microbatch is counted in the buffers and added to the accumulator of each slot that is not done.
A value that its worker holds is not made again. A value that another worker holds is sent. Any other value is made by
the owner of its slot, from the values that this needs. Suppose the worker of stage 1 died after 1B0:

    wanted   ADDED 1 of stage 1 <- 1B1 <- 1F1 <- activation of 0F1, which is held and sent
                                <- 1B0 <- 1F0 <- activation of 0F0, which is not held <- 0f0

A backward that has been added is redone for its input gradient only. Loops never follow the order of a set, so that
every member finds the same tasks in the same order.

A forward reads the buffers that the forward before it has left. The owner's replica keeps the buffers before each
forward that it has counted, so such a forward is redone without an update. Any other forward counts, one after the
other from the step boundary on. This holds for a slot that is done too: its optimizer step takes the logged buffers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import groupby, repeat

from engine.core.action import FORWARD_OPS, OP_TABLE, Action, Op, make_action
from engine.core.errors import ensure
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import line_number, needs
from engine.core.program.schedules import COSTS
from engine.core.value import Held, Kind

SENT_BY_SLOT = frozenset({Kind.ACTIVATION, Kind.GRADIENT})  # they go from slot to slot; one copy is enough

Tasks = dict[Action, list[Action]]
_Makers = Sequence[Action | None]  # by index of the value; None if the value is there


def tasks_left(ownership: Ownership, held: Collection[Held] = (), done: Collection[Slot] = ()) -> Tasks:
    """Returns the compute actions that are left, each with the ones that make a value that it needs.

    The owners of `done` slots hold the inputs of the optimizer step. Of a counter, `held` has the last index only.
    """
    makers = _MakersOfValues(ownership, held, done)
    lines: dict[tuple[int, Op, int, int], list[tuple[_Makers, int]]] = {}  # the first microbatch may need fewer values
    slices = ownership.grid.slices
    tasks: Tasks = {}
    counters = (makers[kind, *slot] for slot in ownership.grid.slots() if slot not in done for kind in _COUNTERS)
    missing = [makes[-1] for makes in counters if makes[-1] is not None]
    while missing:
        action = missing.pop()
        if action in tasks:
            continue
        stage, op, microbatch, pipeline = action
        key = stage, op, line_number(microbatch, slices), pipeline
        line = lines.get(key)
        if line is None:
            values = [value for _, value in needs(action, ownership.owner(pipeline, stage), ownership)]
            line = lines[key] = [(makers[value[:3]], value.index - microbatch) for value in values]
        makers_of_needs = (makes[microbatch + more] for makes, more in line)
        tasks[action] = before = [maker for maker in makers_of_needs if maker is not None]
        missing += before
    return tasks


def progress_of(
    ownership: Ownership, held: Collection[Held], done: Collection[Slot]
) -> dict[tuple[Kind, int, int], int]:
    """Returns how many microbatches the owner of a slot has counted and added, by kind, pipeline and stage."""
    progress = {(Kind.ADDED, *slot): ownership.grid.microbatches for slot in done}
    for place, (kind, pipeline, stage, index) in held:
        if kind in (Kind.COUNTED, Kind.ADDED) and place == ownership.owner(pipeline, stage):
            progress.setdefault((kind, pipeline, stage), index + 1)
    return progress


_COUNTERS = (Kind.COUNTED, Kind.ADDED)


class _MakersOfValues(dict[tuple[Kind, int, int], _Makers]):
    """The actions by which the owner of a slot makes its values, by kind, pipeline and stage; counters decide them."""

    def __init__(self, ownership: Ownership, held: Collection[Held], done: Collection[Slot]):
        self._all = range(ownership.grid.microbatches)
        self._progress = progress_of(ownership, held, done)
        self._there: dict[tuple[Kind, int, int], set[int]] = {}
        for place, (kind, pipeline, stage, index) in held:
            if kind in SENT_BY_SLOT or place == ownership.owner(pipeline, stage):
                self._there.setdefault((kind, pipeline, stage), set()).add(index)

    def __missing__(self, key: tuple[Kind, int, int]) -> _Makers:
        _, pipeline, stage = key
        there = self._there.get(key, ())
        actions = map(make_action, repeat(stage), self._ops(*key), self._all, repeat(pipeline))
        self[key] = makers = [None if action.microbatch in there else action for action in actions]
        return makers

    def _ops(self, kind: Kind, pipeline: int, stage: int) -> list[Op]:
        if kind in (Kind.ACTIVATION, Kind.RESIDUAL, Kind.COUNTED):
            counted = self._progress.get((Kind.COUNTED, pipeline, stage), 0)
            return [Op.REDO_F if each < counted else Op.F for each in self._all]
        # If the owner has run the backward for the input, it has only the one for the weights left.
        split = self._there.get((Kind.PENDING, pipeline, stage), ())
        if kind is Kind.ADDED:
            return [Op.W if each in split else Op.B for each in self._all]
        added = self._progress.get((Kind.ADDED, pipeline, stage), 0)
        return [Op.I if each < added or each in split else Op.B for each in self._all]


# List scheduling: from tasks and their predecessors to an order on each worker.
#
# The forwards of a slot run in microbatch order, and so do its backwards. A forward of microbatch m waits for the
# backward of m - w, so a slot keeps the residuals of w microbatches. This cannot deadlock: a microbatch waits for
# itself and for earlier ones only. The window w counts runs, the consecutive slots of one owner, from the slot to the
# end of its pipeline: equal runs take the time of 1F1B with one slot each, and keep as much. A run that is twice as
# long as another would wait while the pipeline fills, so there windows are one more, up to the number of shortest runs
# that the slots to the end would make.
#
# Slices make the window longer by all but one of them: the backward of the last slice of a microbatch comes first.
#
# A free worker takes its best ready task: forwards first, then by microbatch, then later stages first. With that limit,
# forwards first *is* 1F1B on a worker with one slot:
#
#     stage 0   F0 F1 F2 .  .  B0 F3 B1 ...
#     stage 1   .  F0 F1 .  B0 F2 B1 ...
#     stage 2   .  .  F0 B0 F1 B1 ...
#
# Backwards first would drain the pipeline through a worker with two slots, which then waits while it fills again. The
# order of each worker is taken from one valid run, so workers never wait for each other in a circle.


def merged_compute(ownership: Ownership) -> dict[int, tuple[Action, ...]]:
    """Returns the compute actions of a whole step in list order; workers may own several slots."""
    return list_schedule(tasks_left(ownership), ownership)


def list_schedule(
    tasks: Tasks, ownership: Ownership, first: Collection[Action] = frozenset()
) -> dict[int, tuple[Action, ...]]:
    """Returns the tasks of each owner in order, ready ones of `first` first; `tasks` has the predecessors of each."""
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
    stages, windows = ownership.grid.stages, {}
    for pipeline in range(ownership.grid.pipelines):
        owners = ownership.owners[pipeline * stages : (pipeline + 1) * stages]
        lengths = [len(tuple(run)) for _, run in groupby(owners)]
        shortest, first = min(lengths), 0
        more = max(lengths) >= 2 * shortest
        for number, length in enumerate(lengths):
            for stage in range(first, first + length):
                window = min(len(lengths) - number + more, -(-(stages - stage) // shortest))
                windows[pipeline, stage] = window + ownership.grid.slices - 1
            first += length
    return windows


def _predecessors(order: Sequence[Action], tasks: Tasks, ownership: Ownership) -> list[list[int]]:
    number_of = {action: number for number, action in enumerate(order)}
    before = [[number_of[each] for each in tasks[action]] for action in order]
    forwards: dict[Slot, list[int]] = {}
    backwards: dict[Slot, list[int]] = {}
    for number in sorted(range(len(order)), key=[action.microbatch for action in order].__getitem__):
        stage, op, _, pipeline = order[number]
        ahead = (forwards if op in FORWARD_OPS else backwards).setdefault((pipeline, stage), [])
        if ahead:
            before[number].append(ahead[-1])
        ahead.append(number)
    if ownership.grid.slices > 1:
        _keep_states(order, number_of, before, ownership)
    windows = in_flight(ownership)
    for slot, numbers in forwards.items():
        following = backwards.get(slot, [])
        microbatches = [order[number].microbatch for number in following]
        for number in numbers:
            num_ended = bisect_right(microbatches, order[number].microbatch - windows[slot])
            if num_ended:
                before[number].append(following[num_ended - 1])
    return before


def _keep_states(
    order: Sequence[Action], number_of: dict[Action, int], before: list[list[int]], ownership: Ownership
) -> None:
    """Lets a backward, which drops the state of its slice, wait for the forward of the slice behind, which reads it."""
    grid = ownership.grid
    for number, (stage, op, microbatch, pipeline) in enumerate(order):
        if op in FORWARD_OPS and microbatch % grid.slices:
            backwards = (Action(stage, op, grid.turned(microbatch - 1), pipeline) for op in (Op.B, Op.I))
            for backward in backwards:
                if backward in number_of:
                    before[number_of[backward]].append(number)


def starts(
    workers: Sequence[int], costs: Sequence[float], predecessors: Sequence[Collection[int]]
) -> tuple[list[int], float]:
    """Returns the tasks by start, and when the last one ends; a free worker takes its lowest ready task."""
    successors: list[list[int]] = [[] for _ in workers]
    missing = list(map(len, predecessors))
    for number, numbers in enumerate(predecessors):
        for before in numbers:
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


# Replay: the part of a recovery that redoes work done before the failure.
#
# before the failure   2F0 2F1 2B0 ...            work that is lost with the worker of stage 2
# recovery             2f0 2F1 2B0 | 2F2 2B1 ...  replay is over at the bar: this is the catch-up point

_FIRST = {op: Op(row.redoes) for op, row in OP_TABLE.items() if row.redoes}


def work_of(action: Action) -> Action:
    """Returns the action that first did the work of `action`: itself, unless its op makes an output again."""
    first = _FIRST.get(action.op)
    return action._replace(op=first) if first else action


def replayed(actions: Iterable[Action], done: Iterable[Action]) -> list[Action]:
    """Returns those of `actions`, in order, that redo the work of `done`; replay is over when the last one ends."""
    work = frozenset(map(work_of, done))
    return [action for action in actions if work_of(action) in work] if work else []


def shown_by(held: Iterable[Held]) -> Iterator[Action]:
    """Yields the actions that some worker must have run, by the values that workers hold.

    An activation, or the next stage's counter, shows a forward; a gradient, or the counter of the stage before, a
    backward and its forward. The gradient of stage 0 is never used; that of stage 1 stands in for it.
    """
    for _, (kind, pipeline, stage, index) in held:
        if kind is Kind.ACTIVATION:
            yield Action(stage, Op.F, index, pipeline)
        elif kind is Kind.COUNTED:
            yield from (Action(stage - 1, Op.F, each, pipeline) for each in range(index + 1))
        elif kind is Kind.ADDED:
            for each in range(index + 1):
                yield from _through(stage + 1, each, pipeline)
        elif kind is Kind.GRADIENT and stage > 0:
            for at in (0, 1) if stage == 1 else (stage,):
                yield from _through(at, index, pipeline)


def _through(stage: int, microbatch: int, pipeline: int) -> Iterator[Action]:
    return (Action(stage, op, microbatch, pipeline) for op in (Op.F, Op.B, Op.W))
