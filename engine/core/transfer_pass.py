"""The pass that adds transfers: who sends what a compute action needs and its worker neither holds nor makes.

Rules: a value has one sender: the lowest worker that holds it at the start, else the owner of its slot, which makes it.
A redundant forward takes nothing and gives nothing: its input is at hand. What is held is sent at the front of the
program, in the order in which it is needed; what is made, right after it is made. A value is received just before the
first action that needs it, and after all that the same sender has sent to the same worker before it: of each pair of
workers, the order of receives is that of sends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

from engine.core.action import Action, Op
from engine.core.lineage import SENT_BY_SLOT
from engine.core.ownership import Ownership
from engine.core.requires import Held, Kind, Value, makes, needs

_Place = tuple[int, int]  # (worker, position in its program)
_Want = tuple[int, int, Value]  # (position, worker, value)

_AT_THE_FRONT = -1


def with_transfers(
    program: Mapping[int, tuple[Action, ...]], ownership: Ownership, held: Collection[Held] = ()
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with its transfers; a value that nobody holds or makes is left to the dry run to refuse."""
    wants, source = _walk(program, ownership, held)
    after: dict[_Place, list[Value]] = {}
    takers: dict[Value, list[int]] = {}
    for _, worker, value in sorted(want for want in wants if want[2] in source):
        if value not in takers:
            after.setdefault(source[value], []).append(value)
        takers.setdefault(value, []).append(worker)
    coming: dict[tuple[int, int], deque[Value]] = {}
    for sender, position in sorted(after):
        for value in after[sender, position]:
            for taker in takers[value]:
                coming.setdefault((sender, taker), deque()).append(value)
    before: dict[_Place, list[Value]] = {}
    come: set[tuple[int, Value]] = set()
    for position, worker, value in wants:
        while value in source and (worker, value) not in come:
            arrived = coming[source[value][0], worker].popleft()
            come.add((worker, arrived))
            before.setdefault((worker, position), []).append(arrived)
    return {worker: _spliced(worker, actions, before, after) for worker, actions in program.items()}


def _walk(
    program: Mapping[int, tuple[Action, ...]], ownership: Ownership, held: Collection[Held]
) -> tuple[list[_Want], dict[Value, _Place]]:
    """Returns what each worker wants from another, in the order of its program, and where each value is sent from."""
    source: dict[Value, _Place] = {}
    here = set()
    for worker, value in held:
        if value.kind in SENT_BY_SLOT:
            here.add((worker, value))
            source[value] = min((worker, _AT_THE_FRONT), source.get(value, (worker, _AT_THE_FRONT)))
    wants: list[_Want] = []
    for worker, actions in program.items():
        for position, action in enumerate(actions):
            if worker != ownership.owner(action.pipeline, action.stage):
                continue  # a redundant forward
            for need in needs(action, worker, ownership):
                if need[1].kind in SENT_BY_SLOT and need not in here:
                    wants.append((position, worker, need[1]))
                    here.add(need)
            for made in makes(action, worker, ownership):
                if made[1].kind in SENT_BY_SLOT:
                    here.add(made)
                    source.setdefault(made[1], (worker, position))
    return wants, source


def _spliced(
    worker: int, actions: tuple[Action, ...], before: Mapping[_Place, list[Value]], after: Mapping[_Place, list[Value]]
) -> tuple[Action, ...]:
    parts = [_send(value) for value in after.get((worker, _AT_THE_FRONT), ())]
    for position, action in enumerate(actions):
        place = (worker, position)
        parts += [_receive(value) for value in before.get(place, ())]
        parts.append(action)
        parts += [_send(value) for value in after.get(place, ())]
    return tuple(parts)


def _send(value: Value) -> Action:
    op = Op.SEND_F if value.kind is Kind.ACTIVATION else Op.SEND_B
    return Action(value.stage, op, value.index, value.pipeline)


def _receive(value: Value) -> Action:
    if value.kind is Kind.ACTIVATION:
        return Action(value.stage + 1, Op.RECV_F, value.index, value.pipeline)
    return Action(value.stage - 1, Op.RECV_B, value.index, value.pipeline)
