"""The order in which workers issue the messages of a program on a backend without tags, such as NCCL.

On such a backend the n-th receive from a worker takes its n-th send, a send may wait for its receive, and each worker
has one queue: a message begins when those issued before it have ended. Messages that are issued as one begin together.

The walk goes through the program in columns, one compute action of each worker in turn. Where a value is sent, the
receive is issued too, where the taker has come to. So the queues of all workers are parts of one order in which a
receive directly follows its send:

    worker 0   0F0 0SEND_F0          0F1 ...
    worker 1                1RECV_F0     1F0 ...

No worker waits in a circle, and no two messages cross. A RECV then only waits for a message that was issued before.
Kinds of values that are not in `IN_ORDER` go aside: they are found by their key.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from engine.core.action import COMPUTE_OPS, Action, Op, Program
from engine.core.errors import ScheduleError
from engine.core.ownership import Ownership
from engine.core.program.dependencies import makes, needs, rendezvous
from engine.core.value import WIRE, Held, Kind, Value

# Values of these kinds travel in the order of the program: their order between two workers is known before the step,
# so a backend without tags can carry them. Those of other kinds go aside and are found by their key: a stream may come
# late or never, and only its own header tells the size of a state.
IN_ORDER = frozenset({Kind.ACTIVATION, Kind.GRADIENT, Kind.ADDED, Kind.REDUCED, Kind.LOGGED})
ASIDE = frozenset({Kind.STREAMED, Kind.STATE})


class RoutedValue(NamedTuple):
    """A value on its way from one worker to another."""

    value: Value
    source: int
    target: int


class Issue(NamedTuple):
    """Messages that a worker issues as one, when it has run `behind` of its actions."""

    behind: int
    messages: tuple[RoutedValue, ...]


def issue_order(program: Program, ownership: Ownership, held: Collection[Held] = ()) -> Mapping[int, tuple[Issue, ...]]:
    """Returns the issues of each worker in order; `held` are the values at the start.

    Raises ScheduleError if a worker does not come to its end.
    """
    walk = _Walk(program, ownership, held)
    walk.run()
    return {worker: tuple(issues) for worker, issues in walk.issues.items()}


class _Walk:
    """The state of one walk: how many actions each worker has run, and the values that are there."""

    def __init__(self, program: Program, ownership: Ownership, held: Collection[Held]):
        self.program = program
        self.ownership = ownership
        self.at = dict.fromkeys(program, 0)
        self.there = set(held)
        self.met: set[tuple[int, Action]] = set()
        self.issues: dict[int, list[Issue]] = {worker: [] for worker in program}
        self.takers: dict[Value, list[int]] = defaultdict(list)
        for worker, actions in program.items():
            for action in actions:
                for place, value in needs(action, worker, ownership):
                    if place == WIRE and value.kind in IN_ORDER and worker not in self.takers[value]:
                        self.takers[value].append(worker)

    def run(self) -> None:
        """Runs every worker to its end."""
        lines = {worker: self._columns(worker) for worker in self.program}
        before = -1
        while before < (before := sum(self.at.values())):
            for line in lines.values():
                next(line, None)
        for worker, actions in self.program.items():
            if self.at[worker] < len(actions):
                raise ScheduleError(f"worker {worker} does not come past {actions[self.at[worker]]}")

    def _columns(self, worker: int) -> Iterator[None]:
        """Runs one worker, a compute action at a time, and yields where it must wait."""
        for action in self.program[worker]:
            wanted = [need for need in needs(action, worker, self.ownership) if need[0] == WIRE]
            while not self.there.issuperset(wanted):
                yield
            others = rendezvous(action, worker, self.ownership)
            if others:
                self.met.add((worker, action))
                while not self.met.issuperset(others):
                    yield
                self._exchange(action, (worker, *(other for other, _ in others)))
            self.at[worker] += 1
            made = makes(action, worker, self.ownership)
            self.there.update(made)
            for place, value in made:
                if place == WIRE and value.kind in IN_ORDER:
                    self._send(value, worker)
            if action.op in COMPUTE_OPS:
                yield

    def _send(self, value: Value, source: int) -> None:
        for target in self.takers[value]:
            if target != source:
                message = (RoutedValue(value, source, target),)
                self.issues[source].append(Issue(self.at[source], message))
                self.issues[target].append(Issue(self.at[target], message))

    def _exchange(self, action: Action, owners: tuple[int, ...]) -> None:
        """Issues the messages with which the owners of a stage reduce it: one issue at each of them, together."""
        if action.op is not Op.REDUCE_GRAD or (WIRE, _share(action.stage, 0, self.ownership)) in self.there:
            return
        parts = {
            owner: [
                _share(action.stage, each, self.ownership) for each in self.ownership.pipelines_of(owner, action.stage)
            ]
            for owner in owners
        }
        for owner, mine in parts.items():
            sends = [RoutedValue(value, owner, other) for other in owners if other != owner for value in mine]
            takes = [RoutedValue(value, other, owner) for other in owners if other != owner for value in parts[other]]
            self.issues[owner].append(Issue(self.at[owner], (*sends, *takes)))
        self.there.add((WIRE, _share(action.stage, 0, self.ownership)))


def _share(stage: int, pipeline: int, ownership: Ownership) -> Value:
    """Returns the value that the owner of a stage in one pipeline gives to a reduction."""
    return Value(Kind.ADDED, pipeline, stage, ownership.grid.microbatches - 1)
