"""The order in which workers issue the messages of a program on a backend without tags, such as NCCL.

On such a backend the n-th receive from a worker takes its n-th send, a send may wait for its receive, and each worker
has one queue: a message begins when those issued before it have ended.

The walk goes through the program in columns, one compute action of each worker in turn. Where a value is sent, the
receive is issued too, at the present place of its taker. So the queues of all workers are parts of one order in which a
receive directly follows its send:

    worker 0   0F0 0SEND_F0          0F1 ...
    worker 1                1RECV_F0     1F0 ...

No worker waits in a circle, and no two messages cross. A RECV only waits for a message that was issued before, so it
may be issued as soon as all that its worker issues before it is. Values of other kinds go elsewhere, by their key;
workers wait for them too, so the walk has them. What nobody makes was there at the start.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from engine.core.action import COMPUTE_OPS, Action, Program
from engine.core.errors import ScheduleError
from engine.core.ownership import Ownership
from engine.core.program.dependencies import makes, needs, rendezvous
from engine.core.value import WIRE, Held, Kind, Value

# The values of the SENDs and RECVs of a step: all that a backend without tags carries. Sums, logs, streams and states
# may come late or never, or from another thread.
WITHOUT_TAGS: Final = frozenset({Kind.ACTIVATION, Kind.GRADIENT})


class RoutedValue(NamedTuple):
    """A value on its way from one worker to another."""

    value: Value
    source: int
    target: int


class Issue(NamedTuple):
    """A message that a worker issues when it has run `behind` of its actions, or earlier if it receives it."""

    behind: int
    message: RoutedValue


def issue_order(program: Program, ownership: Ownership) -> Mapping[int, tuple[Issue, ...]]:
    """Returns the issues of each worker in order; raises ScheduleError if a worker does not reach its end."""
    walk = _Walk(program, ownership)
    walk.run()
    return {worker: tuple(issues) for worker, issues in walk.issues.items()}


def issued_by(worker: int, program: Program, ownership: Ownership) -> tuple[RoutedValue, ...]:
    """Returns the messages that a worker sends and receives on a backend without tags, in its order."""
    return tuple(issue.message for issue in issue_order(program, ownership).get(worker, ()))


class _Walk:
    """The state of one walk: how many actions each worker has run, and the values that are there."""

    def __init__(self, program: Program, ownership: Ownership):
        self.program = program
        self.ownership = ownership
        self.at = dict.fromkeys(program, 0)
        self.met: set[tuple[int, Action]] = set()
        self.issues: dict[int, list[Issue]] = {worker: [] for worker in program}
        self.takers: dict[Value, list[int]] = defaultdict(list)
        wanted: set[Held] = set()
        made: set[Held] = set()
        for worker, actions in program.items():
            for action in actions:
                made.update(makes(action, worker, ownership))
                for place, value in needs(action, worker, ownership):
                    if place != WIRE:
                        continue
                    wanted.add((place, value))
                    if value.kind in WITHOUT_TAGS and worker not in self.takers[value]:
                        self.takers[value].append(worker)
        self.there = wanted - made

    def run(self) -> None:
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
            self.at[worker] += 1
            made = makes(action, worker, self.ownership)
            self.there.update(made)
            for place, value in made:
                if place == WIRE and value.kind in WITHOUT_TAGS:
                    self._send(value, worker)
            if action.op in COMPUTE_OPS:
                yield

    def _send(self, value: Value, source: int) -> None:
        for target in self.takers[value]:
            if target != source:
                message = RoutedValue(value, source, target)
                self.issues[source].append(Issue(self.at[source], message))
                self.issues[target].append(Issue(self.at[target], message))
