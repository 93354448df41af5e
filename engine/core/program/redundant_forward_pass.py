"""The pass that adds redundant forwards: the first shadow of a slot runs the slot's forwards while it would wait.

Only a shadow that has the input takes part: it owns the preceding stage of the same pipeline or runs the forwards of
that stage again too, or the slot is of stage 0, whose input is data. So the pass adds no transfer. A worker's own
actions keep their order and come first. A redundant forward that is ready fills a gap, lowest microbatch first; without
a gap it stands behind the last backward. The gaps are those of a run with the given costs. Worker 0 shadows stage 1:

    worker 0   0F0 0F1 1F0 1F1 0B0      0B1
    worker 1       1F0 1B0     1F1 1B1

A redundant forward without a gap makes the step longer wherever it stands. So some of them stand sooner, where a kill
finds them done: one behind each of the first backwards that a forward follows. All workers do so, and wait for each
other no longer than one forward. If that makes the step longer than before, the pass undoes it.

The pass comes before that of the transfers, which gives no transfer to a redundant forward.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import pairwise

from engine.core.action import FORWARD_OPS, Action, Op
from engine.core.ownership import Ownership, Slot
from engine.core.program.dependencies import makes, needs
from engine.core.program.list_scheduler import COSTS, starts
from engine.core.value import Held, Kind

_Task = tuple[int, Action]  # (worker, action)


def with_redundant_forwards(
    program: Mapping[int, tuple[Action, ...]],
    ownership: Ownership,
    cost: Callable[[Action], float] = lambda action: COSTS[action.op],
    healing: Collection[tuple[int, Slot]] = (),
) -> dict[int, tuple[Action, ...]]:
    """Returns a program of compute actions with the redundant forwards; the `healing` (worker, slot) take no part."""
    own = [(worker, action) for worker, actions in program.items() for action in actions]
    tasks = own + sorted(_redundant(ownership, healing), key=lambda task: (task[1].microbatch, task[1].stage, task))
    workers, costs = [worker for worker, _ in tasks], [cost(action) for _, action in tasks]
    before = _predecessors(tasks, len(own), ownership)
    order, length = starts(workers, costs, before)
    _, least = starts(workers[: len(own)], costs[: len(own)], before[: len(own)])
    if length > least:
        num_sooner = int((length - least) / max(costs[len(own) :]))
        sooner, its_length = starts(workers, costs, _sooner(order, tasks, len(own), before, num_sooner))
        order = sooner if its_length <= length else order
    lists: dict[int, list[Action]] = {worker: [] for worker in sorted({*program, *workers})}
    for number in order:
        worker, action = tasks[number]
        lists[worker].append(action)
    return {worker: tuple(actions) for worker, actions in lists.items()}


def _sooner(
    order: Sequence[int], tasks: Sequence[_Task], num_own: int, before: Sequence[list[int]], most: int
) -> list[list[int]]:
    """Returns `before` with `most` redundant forwards of each worker behind one backward each, if their input is there.

    They are the first ones in `order` behind the first backward.
    """
    found = [list(each) for each in before]
    lines: dict[int, list[int]] = {}
    for number in order:
        lines.setdefault(tasks[number][0], []).append(number)
    for line in lines.values():
        own = [number for number in line if number < num_own]
        backwards = {number for number in own if tasks[number][1].op not in FORWARD_OPS}
        first = next((place for place, number in enumerate(line) if number in backwards), len(line))
        left = deque([number for number in line[first:] if number >= num_own][:most])
        for number, following in pairwise(own):
            turns = number in backwards and following not in backwards
            if turns and left and all(each <= number or each >= num_own for each in before[left[0]]):
                found[following].append(left.popleft())
    return found


def redundant_slots(ownership: Ownership, healing: Collection[tuple[int, Slot]] = ()) -> dict[Slot, int]:
    """Returns the slots whose forwards are run twice, each with the shadow that runs them again."""
    found: dict[Slot, int] = {}
    for pipeline, stage in ownership.grid.slots():
        first = ownership.shadows_of(pipeline, stage)[:1]
        for shadow in first:
            before = (pipeline, stage - 1)
            at_hand = stage == 0 or ownership.owner(*before) == shadow or found.get(before) == shadow
            if at_hand and (shadow, (pipeline, stage)) not in healing:
                found[pipeline, stage] = shadow
    return found


def lazy_slots(ownership: Ownership, healing: Collection[tuple[int, Slot]] = ()) -> tuple[Slot, ...]:
    """Returns the slots with a shadow whose forwards are run once under `eager` too: their input is not at hand."""
    twice = redundant_slots(ownership, healing)
    return tuple(slot for slot in ownership.grid.slots() if ownership.shadows_of(*slot) and slot not in twice)


def overhead_floor(num_stages: int, num_microbatches: int, forward: float, backward: float) -> float:
    """Returns the least share by which redundant forwards lengthen 1F1B, for equal stages on workers without overlap.

    A worker computes for M (2F + B), and the last but one cannot begin before (P - 2) F.
    """
    excess = (num_microbatches - 1) * forward - (num_stages - 1) * backward
    return max(0.0, excess) / ((num_microbatches + num_stages - 1) * (forward + backward))


def _redundant(ownership: Ownership, healing: Collection[tuple[int, Slot]]) -> Iterator[_Task]:
    for (pipeline, stage), shadow in redundant_slots(ownership, healing).items():
        for microbatch in range(ownership.grid.microbatches):
            yield shadow, Action(stage, Op.F, microbatch, pipeline)


def _predecessors(tasks: Sequence[_Task], num_own: int, ownership: Ownership) -> list[list[int]]:
    """Returns for each task the numbers of the tasks that must end before it starts.

    The first `num_own` tasks are the owners', in order on each worker. The other tasks are redundant, in order for each
    slot. Their outputs are used by redundant tasks of the same worker alone.
    """
    maker = {
        value: number
        for number, (worker, action) in enumerate(tasks[:num_own])
        for _, value in makes(action, worker, ownership)
        if value.kind is not Kind.COUNTED  # each replica has its own counter, and the order sees to it
    }
    again: dict[Held, int] = {}
    last: dict[int | Slot, int] = {}
    found: list[list[int]] = []
    for number, (worker, action) in enumerate(tasks):
        needed = needs(action, worker, ownership)
        found.append([again.get((place, value), maker[value]) for place, value in needed if value in maker])
        if number >= num_own:
            again.update(dict.fromkeys(makes(action, worker, ownership), number))
        line = worker if number < num_own else (action.pipeline, action.stage)
        if line in last:
            found[number].append(last[line])
        last[line] = number
    return found
