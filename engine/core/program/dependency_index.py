"""The happens-before rule in numbers, for walks over programs of a million actions.

The numbers are read off `needs`, `makes` and `rendezvous`. The actions of one op on one slot of one worker need and
make the same values, further by the microbatch; the first microbatch may need fewer. So the rule is asked twice for all
of them, and the rest is an addition: the values of one place, kind and slot have successive numbers.

    1F0  needs 40     makes 80 120 160     activation 0 of stage 0 is 40, residual 0 of stage 1 is 120
    1F3  needs 43 162 makes 83 123 163     1F3 also needs counter 2 of stage 1: 160 + 2
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

from engine.core.action import Action, Op
from engine.core.ownership import Ownership
from engine.core.program.dependencies import makes, needs, rendezvous
from engine.core.value import Kind, Value

Thing = tuple[int, Value | Action]  # a value at a place, or an action that its worker has begun


class IndexedActions(NamedTuple):
    """The values that the actions of one op on one slot need and make: numbers, less the microbatch of the action.

    An action begins when all its `needs` are there. It then makes its `begins`, and runs when its `meets` are there.
    """

    needs: tuple[int, ...]
    begins: tuple[int, ...]
    meets: tuple[int, ...]
    makes: tuple[int, ...]


class DependencyIndex:
    """Gives a number below `len` to each value that was asked for."""

    def __init__(self, program: Mapping[int, tuple[Action, ...]], ownership: Ownership):
        self._ownership = ownership
        most = max(map(itemgetter(2), chain.from_iterable(program.values())), default=0)
        self._width = 2 + max(most, ownership.grid.microbatches, *ownership.workers())  # an index is -1 or more
        self._rows: dict[tuple[int, Kind | Op, int, int], int] = {}

    def __len__(self) -> int:
        return self._width * len(self._rows)

    def of(self, thing: Thing) -> int:
        """Returns the number of a thing."""
        place, content = thing
        if isinstance(content, Value):
            kind, pipeline, stage, index = content
            return self._row(place, kind, pipeline, stage) + index
        stage, op, index, pipeline = content
        return self._row(place, op, pipeline, stage) + index

    def _row(self, place: int, kind: Kind | Op, pipeline: int, stage: int) -> int:
        """Returns the number of the thing with index 0."""
        return self._rows.setdefault((place, kind, pipeline, stage), len(self._rows)) * self._width + 1

    def thing(self, number: int) -> Thing:
        """Returns the thing that has a number."""
        row, above = divmod(number, self._width)
        place, kind, pipeline, stage = list(self._rows)[row]
        if isinstance(kind, Kind):
            return place, Value(kind, pipeline, stage, above - 1)
        return place, Action(stage, kind, above - 1, pipeline)

    def line(self, action: Action, worker: int) -> IndexedActions:
        """Returns the line of a worker's actions that differ from `action` in the microbatch alone.

        Microbatch 0 has a line for itself.
        """
        needed, made = needs(action, worker, self._ownership), makes(action, worker, self._ownership)
        met: tuple[Thing, ...] = rendezvous(action, worker, self._ownership)
        begun: tuple[Thing, ...] = ((worker, action),) if met else ()

        def numbers(things: Iterable[Thing]) -> tuple[int, ...]:
            return tuple(self.of(thing) - action.microbatch for thing in things)

        return IndexedActions(numbers(needed), numbers(begun), numbers(met), numbers(made))
