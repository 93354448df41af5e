"""The happens-before rule in numbers, for walks over programs of a million actions.

Nothing is stated here: the numbers are read off `needs`, `makes` and `rendezvous`. What a worker's actions of one op on
one slot need and make moves along with the microbatch; of the first the rule may ask less. So the rule is asked twice
for all of them, and what is left is an addition. The things of one place, kind and slot have numbers side by side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from engine.core.action import RECEIVE_OPS, SEND_OPS, Action, Op
from engine.core.ownership import Ownership
from engine.core.program.dependencies import Kind, Value, carried, makes, needs, rendezvous

TAKEN = -2  # the place, beside WIRE, of a value that somebody has begun to receive
Thing = tuple[int, Value | Action]  # a value at a place, or an action that its worker has begun


class Line(NamedTuple):
    """What the actions of one op on one slot need and make: numbers, less the microbatch of the action.

    An action has begun when all that it `needs` is there; it then makes what `begins`, and runs when what it `meets` is
    there too.
    """

    needs: tuple[int, ...]
    begins: tuple[int, ...]
    meets: tuple[int, ...]
    makes: tuple[int, ...]


class Numbers:
    """Gives a number to everything that the actions of a program need and make: below `len`, as far as asked.

    With `blocking` a SEND meets its receive: it ends only when somebody has begun to take what it sends.
    """

    def __init__(self, program: Mapping[int, tuple[Action, ...]], ownership: Ownership, blocking: bool = False):
        self._ownership = ownership
        self._blocking = blocking
        most = max(map(itemgetter(2), chain.from_iterable(program.values())), default=0)
        self._width = 2 + max(most, ownership.grid.microbatches, *ownership.workers())  # an index is -1 or more
        self._rows: dict[tuple[int, Kind | Op, int, int], int] = {}

    def __len__(self) -> int:
        return self._width * len(self._rows)

    def of(self, thing: Thing) -> int:
        """Returns the number of a thing."""
        place, what = thing
        if isinstance(what, Value):
            kind, pipeline, stage, index = what
            return self._row(place, kind, pipeline, stage) + index
        stage, op, index, pipeline = what
        return self._row(place, op, pipeline, stage) + index

    def _row(self, place: int, kind: Kind | Op, pipeline: int, stage: int) -> int:
        """Returns the number of the thing with index 0."""
        return self._rows.setdefault((place, kind, pipeline, stage), len(self._rows)) * self._width + 1

    def thing(self, number: int) -> Thing:
        """Returns what has a number."""
        row, above = divmod(number, self._width)
        place, kind, pipeline, stage = list(self._rows)[row]
        if isinstance(kind, Kind):
            return place, Value(kind, pipeline, stage, above - 1)
        return place, Action(stage, kind, above - 1, pipeline)

    def line(self, action: Action, worker: int) -> Line:
        """Returns the line of a worker's actions that differ from `action` in the microbatch alone.

        Microbatch 0 has a line for itself.
        """
        needed, made = needs(action, worker, self._ownership), makes(action, worker, self._ownership)
        begun: tuple[Thing, ...] = ()
        met: tuple[Thing, ...] = rendezvous(action, worker, self._ownership)
        if met:
            begun = ((worker, action),)
        elif self._blocking and action.op in SEND_OPS:
            met = ((TAKEN, carried(action)),)
        elif self._blocking and action.op in RECEIVE_OPS:
            needed, begun, met = (), ((TAKEN, carried(action)),), needed

        def numbers(things: Iterable[Thing]) -> tuple[int, ...]:
            return tuple(self.of(thing) - action.microbatch for thing in things)

        return Line(numbers(needed), numbers(begun), numbers(met), numbers(made))
