"""The items of an iterable data set by their places in the row of all items of a run, and positions in it.

Rules: begun anew, a stream gives the same items in the same order. The random streams of the process are set before
each item, by a key of its pass and place, so an item may draw. A stream that ends begins its next pass. A worker reads
in order, and keeps the items that a replay of the open step can ask for. For an earlier item, or one behind a known
position, it begins again: at the newest position before the item.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from engine.core.errors import Problem, UserError
from engine.core.manifest import MOST_OF_POSITION, DamagedCheckpointError
from engine.core.random_key import random_key
from engine.core.texts import counted

_MOST_POSITIONS = 4
_MOST_OF_STATE = MOST_OF_POSITION - 200  # the numbers of a position stand beside it
_WITHOUT = "return the stream without it, as a generator: a resume then reads the pass from its beginning"


class StreamPosition(NamedTuple):
    """A place between two items: `items` of the run are before it, `in_pass` of them in the pass `data_epoch`.

    The next item is the first of `step`. `state` is what the stream's own `state_dict` gave, None without one.
    """

    step: int = 0
    items: int = 0
    data_epoch: int = 0
    in_pass: int = 0
    state: Any = None

    def text(self) -> str:
        """Returns the position as a checkpoint keeps it."""
        return json.dumps(self, allow_nan=False)

    @classmethod
    def of_text(cls, text: str) -> StreamPosition:
        """Returns the position that a checkpoint has kept; raises DamagedCheckpointError for another text."""
        try:
            *places, state = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            places, state = [], None
        if len(places) != len(cls._fields) - 1 or any(type(each) is not int or each < 0 for each in places):
            raise DamagedCheckpointError(f"expected the position of a stream, found {text[:80]!r}")
        return cls(**dict(zip(cls._fields, (*places, state), strict=True)))


class StreamReader:
    """Reads the stream that `begin` makes, anew with each call; `start` is where the run or its checkpoint begins."""

    def __init__(self, begin: Callable[[], Iterable[Any]], seed: int):
        self.start = StreamPosition()
        self._begin, self._seed = begin, seed
        self._known: list[StreamPosition] = []  # of the last checkpoints
        self._at, self._floor = StreamPosition(), 0
        self._kept: dict[int, Any] = {}  # items by place, from `_floor` on
        self._stream: Any = None
        self._items: Iterator[Any] | None = None

    def begin_at(self, start: StreamPosition) -> None:
        """Sets the position of the checkpoint that the run goes on from."""
        self.start = start

    def forget(self, below: int) -> None:
        """Forgets the items before a place."""
        self._floor = below
        self._kept = {place: item for place, item in self._kept.items() if place >= below}

    def items(self, first: int, count: int) -> list[Any]:
        """Returns the items from a place on; raises UserError for a stream without items."""
        if first not in self._kept:
            self._go_to(first)
        while self._at.items < first + count:
            self._read()
        return [self._kept[place] for place in range(first, first + count)]

    def position(self, step: int, items: int) -> StreamPosition:
        """Returns the position before a step, of which so many items come before it, and keeps it as a known one."""
        saved = next((each for each in (self.start, *self._known) if each.items == items), None)
        if saved is None:
            self._go_to(items)
            saved = self._at._replace(state=self.state())
            self._known = [*self._known[1 - _MOST_POSITIONS :], saved]
        return saved._replace(step=step)

    def state(self) -> Any:
        """Returns a copy of the stream's state behind the last item; raises UserError if no checkpoint can keep it."""
        state = self._stream.state_dict() if hasattr(self._stream, "state_dict") else None
        try:
            text = json.dumps(state, allow_nan=False)
            copied = json.loads(text)
            why = "" if copied == state else "a value that JSON changes, such as a tuple or a number as a key"
        except (TypeError, ValueError, RecursionError) as error:
            text, copied, why = "", None, str(error)
        if len(text) > _MOST_OF_STATE:
            why = f"{len(text)} characters after {counted(self._at.items, 'item')}"
        if why:
            expected = f"a state_dict() of the stream of at most {_MOST_OF_STATE} characters as JSON"
            raise UserError([Problem("data", expected, why, _WITHOUT)])
        return copied

    def _go_to(self, place: int) -> None:
        """Reads up to a place; begins again for one that was passed, and where a known position saves reading."""
        positions = (StreamPosition(), self.start, *self._known)
        best = max((each for each in positions if each.items <= place), key=lambda position: position.items)
        if self._stream is not None and self._at.items <= place and best.items <= self._at.items:
            best = self._at
        else:
            self._open(best.data_epoch, best.state)
            is_there = best.state is not None or not best.in_pass
            self._at = best if is_there else best._replace(items=best.items - best.in_pass, in_pass=0)
        while self._at.items < place:
            self._read()

    def _open(self, data_epoch: int, state: Any = None) -> None:
        with torch.random.fork_rng(devices=[]):
            self._stream = self._begin()
        if hasattr(self._stream, "set_epoch"):
            self._stream.set_epoch(data_epoch)
        if state is not None:
            self._stream.load_state_dict(state)
        self._items = None

    def _read(self) -> None:
        if self._stream is None:
            self._go_to(self._at.items)
        at = self._at
        set_streams(random_key(self._seed, "stream", at.data_epoch, at.in_pass))
        if self._items is None:
            self._items = iter(self._stream)
        try:
            item = next(self._items)
        except StopIteration:
            if not at.in_pass:
                raise UserError([Problem("data", "at least one item in the stream", "an empty one")]) from None
            self._open(at.data_epoch + 1)
            self._at = at._replace(data_epoch=at.data_epoch + 1, in_pass=0)
            return
        except Exception:
            self._stream = None  # which is begun again for the next try: a generator that has raised is at its end
            raise
        if at.items >= self._floor:
            self._kept[at.items] = item
        self._at = at._replace(items=at.items + 1, in_pass=at.in_pass + 1)


def set_streams(key: int) -> None:
    """Sets the random streams of the process: those of torch, Python and numpy."""
    torch.default_generator.manual_seed(key)
    random.seed(key)
    if numpy_random := sys.modules.get("numpy.random"):
        numpy_random.seed(key % 2**32)
