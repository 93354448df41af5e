"""The pass that adds transfers of the values that a compute action needs and its worker neither holds nor makes.

A value has one sender and one taker. The sender is the lowest worker that holds the value at the start, else the owner
of its slot, which makes it. The taker is the owner of the slot that needs it. A redundant forward has no transfers: its
input is on its worker.

    worker 0   0F0 0SEND_F0 0F1 0SEND_F1 ...       a value that is made is sent right behind its maker
    worker 1            1RECV_F0 1F0 1RECV_F1 1F1  and received just before the first action that needs it

Values that are held at the start are sent at the front of the program, in the order in which they are needed. Each pair
of workers receives in the order of its sends: a receive stands behind the receives of all earlier sends of that pair.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

from engine.core.action import Action, Op, make_action
from engine.core.ownership import Ownership
from engine.core.program.dependencies import RECEIVES, SENDS, makes, needs
from engine.core.program.dependency_index import DependencyIndex
from engine.core.program.remaining_tasks import SENT_BY_SLOT
from engine.core.value import WIRE, Held, Kind, Value


def with_transfers(
    program: Mapping[int, tuple[Action, ...]], ownership: Ownership, held: Collection[Held] = ()
) -> dict[int, tuple[Action, ...]]:
    """Returns the program with its transfers; the dry run refuses a value that no worker holds or makes."""
    exchange = _Exchange(program, ownership)
    values = [(worker, value) for worker, value in held if value.kind in SENT_BY_SLOT]
    exchange.find_takers(values)
    front = exchange.send_held(values)
    exchange.send_made()
    return {worker: (*front[worker], *exchange.spliced(worker)) for worker in program}


class _Line(NamedTuple):
    """The values that the actions of one op on one slot take and give: number less the microbatch, and transfer."""

    takes: tuple[tuple[int, Op], ...]
    gives: tuple[tuple[int, Op], ...]


class _Lines(dict[tuple[int, Op, int], _Line]):
    """The lines of one worker by stage, op and pipeline."""

    def __init__(self, worker: int, ownership: Ownership, numbers: DependencyIndex):
        self._worker = worker
        self._ownership = ownership
        self._numbers = numbers

    def __missing__(self, key: tuple[int, Op, int]) -> _Line:
        stage, op, pipeline = key
        first, here = Action(stage, op, 0, pipeline), (self._worker, self._ownership)
        takes = self._ends(needs(first, *here), RECEIVES)
        gives = self._ends(makes(first, *here), SENDS)
        redundant = self._worker != self._ownership.owner(pipeline, stage)
        self[key] = line = _Line((), ()) if redundant else _Line(takes, gives)
        return line

    def _ends(self, things: Iterable[Held], ops: Mapping[Kind, Op]) -> tuple[tuple[int, Op], ...]:
        return tuple((self._numbers.of((WIRE, value)), ops[value.kind]) for _, value in things if value.kind in ops)


class _Exchange:
    """The values that go from worker to worker, by number: taker, sender, and the actions of both."""

    def __init__(self, program: Mapping[int, tuple[Action, ...]], ownership: Ownership):
        self.program = program
        self.numbers = DependencyIndex(program, ownership)
        self.lines: dict[int, list[_Line]] = {}  # of each worker's actions, in order
        for worker, actions in program.items():
            lines = _Lines(worker, ownership, self.numbers)
            self.lines[worker] = [lines[stage, op, pipeline] for stage, op, _, pipeline in actions]
        self.taker: dict[int, int] = {}
        self.taken_at: dict[int, int] = {}  # a position in its program
        self.receives: dict[int, Action] = {}
        self.sends: dict[int, Action] = {}
        self.under_way: dict[int, int] = {}  # its sender
        self.queues: dict[tuple[int, int], deque[int]] = defaultdict(deque)  # by sender and taker

    def find_takers(self, held: Iterable[Held]) -> None:
        """Finds the values that a worker needs and has neither held nor made by then."""
        here: dict[int, set[int]] = defaultdict(set)
        for worker, value in held:
            here[worker].add(self.numbers.of((WIRE, value)))
        for worker, actions in self.program.items():
            there = here[worker]
            for position, (action, (takes, gives)) in enumerate(zip(actions, self.lines[worker], strict=True)):
                stage, _, microbatch, pipeline = action
                for number, receive in takes:
                    taken = number + microbatch
                    if taken not in there:
                        there.add(taken)
                        self.taker[taken], self.taken_at[taken] = worker, position
                        self.receives[taken] = make_action(stage, receive, microbatch, pipeline)
                for number, _ in gives:
                    there.add(number + microbatch)

    def _send(self, number: int, worker: int) -> None:
        self.under_way[number] = worker
        self.queues[worker, self.taker[number]].append(number)

    def send_held(self, held: Collection[Held]) -> dict[int, list[Action]]:
        """Sends held values in the order in which they are needed; returns the sends of each worker."""
        holder: dict[Value, int] = {}
        for worker, value in held:
            holder[value] = min(worker, holder.get(value, worker))
        wanted = []
        for value, worker in holder.items():
            number = self.numbers.of((WIRE, value))
            if number in self.taker:
                wanted.append((self.taken_at[number], self.taker[number], value, worker, number))
        front: dict[int, list[Action]] = defaultdict(list)
        for _, _, value, worker, number in sorted(wanted):
            self._send(number, worker)
            front[worker].append(Action(value.stage, SENDS[value.kind], value.index, value.pipeline))
        return front

    def send_made(self) -> None:
        """Sends every other value that has a taker, when it is made for the first time."""
        for worker, actions in self.program.items():
            for (stage, _, microbatch, pipeline), (_, gives) in zip(actions, self.lines[worker], strict=True):
                for number, send in gives:
                    given = number + microbatch
                    if given in self.taker and given not in self.under_way:
                        self._send(given, worker)
                        self.sends[given] = make_action(stage, send, microbatch, pipeline)

    def spliced(self, worker: int) -> list[Action]:
        """Returns a worker's actions with each receive before its use and each send behind its maker."""
        parts = []
        under_way, queues, receives, sends = self.under_way, self.queues, self.receives, self.sends
        for action, (takes, gives) in zip(self.program[worker], self.lines[worker], strict=True):
            microbatch = action[2]
            for number, _ in takes:
                taken = number + microbatch
                while taken in under_way:
                    come = queues[under_way[taken], worker].popleft()
                    parts.append(receives[come])
                    del under_way[come]
            parts.append(action)
            for number, _ in gives:
                send = sends.pop(number + microbatch, None)
                if send is not None:
                    parts.append(send)
        return parts
