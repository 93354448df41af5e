"""Sources of data that are not pure, in one way each; and sources that only look as if.

Inputs and targets of a microbatch belong together: each target is the sum of its row.
"""

from __future__ import annotations

import io
import os
import random
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.models.data import DataFacts, keyed_generator
from engine.models.layers import Batch

WIDTH = 32


class Pure:
    """Rows of numbers and their sums, drawn by key; `shift` may add a number."""

    facts = DataFacts(task="regress", features=WIDTH, outputs=1)

    def __init__(self, seed: int):
        self.seed = seed

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        return self._batch(self._rows(size, step, pipeline, microbatch) + self.shift(step, pipeline, microbatch))

    def validation(self, index: int, size: int) -> Batch:
        return self._batch(self._rows(size, "validation", index))

    def shift(self, step: int, pipeline: int, microbatch: int) -> float:
        return 0.0

    def _rows(self, size: int, *key: int | str) -> Tensor:
        return torch.randn(size, WIDTH, generator=keyed_generator(self.seed, *key))

    def _batch(self, rows: Tensor) -> Batch:
        return Batch((rows,), (rows.sum(dim=1, keepdim=True),))


def shifted(shift: Callable[..., float]) -> type[Pure]:
    """Returns a source whose rows have a number added, that `shift` makes of source, step, pipeline and microbatch."""
    return type("Shifted", (Pure,), {"shift": shift})


class Iterating(Pure):
    """Takes the next rows of a stream of its own."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.stream = iter(range(10**6))

    def shift(self, *_: int) -> float:
        return float(next(self.stream))


class Reading(Pure):
    """Reads the next bytes of a file."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.file = io.BytesIO(bytes(range(256)))

    def shift(self, *_: int) -> float:
        return float(self.file.read(1)[0])


class OwnStream(Pure):
    """Draws from a generator that it keeps."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.stream = torch.Generator().manual_seed(seed)

    def shift(self, *_: int) -> float:
        return float(torch.rand((), generator=self.stream))


class Remembering(Pure):
    """Fills a cache from a stream: the second load of a microbatch is like the first, in this process."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.stream = random.Random(seed)  # noqa: S311
        self.known: dict[tuple[int, ...], float] = {}

    def shift(self, *place: int) -> float:
        if place not in self.known:
            self.known[place] = self.stream.random()
        return self.known[place]


class ShufflingAtTheBegin(Pure):
    """Makes the order of a step in its microbatch 0, which another worker may not have loaded."""

    order = 0.0

    def shift(self, step: int, pipeline: int, microbatch: int) -> float:
        if microbatch == 0:
            self.order = float(step)
        return self.order


class SeedingOnce(Pure):
    """Seeds torch's generator in the first microbatch only."""

    def shift(self, step: int, pipeline: int, microbatch: int) -> float:
        if (step, microbatch) == (0, 0):
            torch.manual_seed(self.seed)
        return float(torch.rand(()))


class OneBuffer(Pure):
    """Returns the same memory each time."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.buffer = np.zeros((64, WIDTH), dtype=np.float32)

    def _batch(self, rows: Tensor) -> Batch:
        self.buffer[: len(rows)] = rows.numpy()
        return Batch((torch.from_numpy(self.buffer)[: len(rows)],), (rows.sum(dim=1, keepdim=True),))


class Accumulating(Pure):
    """Changes the rows that it keeps."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.kept = torch.zeros(WIDTH)

    def _batch(self, rows: Tensor) -> Batch:
        self.kept += 1
        return super()._batch(rows + self.kept)


class TargetsAlone(Pure):
    """Adds noise to the targets alone."""

    def _batch(self, rows: Tensor) -> Batch:
        return Batch((rows,), (rows.sum(dim=1, keepdim=True) + random.random(),))  # noqa: S311


class Validation(Pure):
    """Draws its validation from torch's generator."""

    def validation(self, index: int, size: int) -> Batch:
        return self._batch(torch.randn(size, WIDTH))


class Late(Pure):
    """Is pure until a step."""

    def __init__(self, seed: int, first: int = 5):
        super().__init__(seed)
        self.first = first

    def shift(self, step: int, pipeline: int, microbatch: int) -> float:
        return random.random() if step >= self.first else 0.0  # noqa: S311


class LateOnce(Late):
    """Is impure in one step alone, which the trial does not load."""

    def shift(self, step: int, pipeline: int, microbatch: int) -> float:
        return random.random() if step == self.first else 0.0  # noqa: S311


class InOnePlace(Pure):
    """Draws from torch's generator in one microbatch alone."""

    def shift(self, step: int, pipeline: int, microbatch: int) -> float:
        return float(torch.rand(())) if (step, microbatch) == (8, 3) else 0.0


class OfHeir(Pure):
    """Has other rows in worker 1 in one step, which the trial does not load."""

    def shift(self, step: int, pipeline: int, microbatch: int) -> float:
        return float(step == 4 and Path("/proc/self/comm").read_text() == "bamboo-1\n")


# The way in which it is not pure -> source, and the words of the refusal.
IMPURE: dict[str, tuple[type[Pure], str]] = {
    "python": (shifted(lambda *_: random.random()), "inputs and targets"),  # noqa: S311
    "numpy": (shifted(lambda *_: float(np.random.rand())), "inputs and targets"),
    "torch": (shifted(lambda *_: float(torch.rand(()))), "inputs and targets"),
    "counter": (Iterating, "inputs and targets"),
    "file cursor": (Reading, "inputs and targets"),
    "own generator": (OwnStream, "inputs and targets"),
    "nanoseconds": (shifted(lambda *_: float(time.time_ns() % 10**6)), "inputs and targets"),
    "seconds": (shifted(lambda *_: float(int(time.time()) % 1000)), "inputs and targets"),
    "process": (shifted(lambda *_: float(os.getpid() % 1000)), "inputs and targets"),
    "entropy": (shifted(lambda *_: uuid.uuid4().int % 1000 / 7), "inputs and targets"),
    "cache of a stream": (Remembering, "inputs and targets"),
    "shuffle in microbatch 0": (ShufflingAtTheBegin, "inputs and targets"),
    "seeded once": (SeedingOnce, "inputs and targets"),
    "later steps": (shifted(lambda _, step, *__: random.random() * (step > 0)), "inputs and targets"),  # noqa: S311
    "one step": (
        InOnePlace,
        "inputs and targets",
    ),
    "another pipeline": (shifted(lambda _, __, pipeline, ___: random.random() * pipeline), "inputs and targets"),  # noqa: S311
    "last microbatch": (shifted(lambda *place: random.random() * (place[3] == 3)), "inputs and targets"),  # noqa: S311
    "one buffer": (OneBuffer, "was overwritten by a later call"),
    "accumulator": (Accumulating, "inputs and targets"),
    "targets alone": (TargetsAlone, "the targets of"),
    "validation": (Validation, "validation microbatch"),
}


class SeedingEachTime(Pure):
    """Seeds torch's generator in each call, and leaves it where it is."""

    def shift(self, *place: int) -> float:
        torch.manual_seed(sum(place))
        return float(torch.rand(()))


class Views(Pure):
    """Returns views of rows that it keeps; microbatches share rows."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.kept = self._rows(300, "kept")

    def _rows(self, size: int, *key: int | str) -> Tensor:
        return super()._rows(size, *key) if key == ("kept",) else self.kept[hash(key) % 100 :][:size]


class ShuffledOnce(Pure):
    """Draws an order in its constructor, with bamboo's seed of the process."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.order = [random.random(), float(torch.rand(()))]  # noqa: S311

    def shift(self, *_: int) -> float:
        return sum(self.order)


class Cached(Pure):
    """Keeps the microbatches that it has made."""

    def __init__(self, seed: int):
        super().__init__(seed)
        self.known: dict[Any, Batch] = {}

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        key = (step, pipeline, microbatch, size)
        self.known[key] = self.known.get(key) or super().microbatch(*key)
        return self.known[key]


class Lacking(Pure):
    """Has no last step."""

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        if step > 6:
            raise KeyError("no such step")
        return super().microbatch(step, pipeline, microbatch, size)


PURE: dict[str, type[Pure]] = {
    "plain": Pure,
    "seeded each time": SeedingEachTime,
    "views": Views,
    "cached": Cached,
    "lacking": Lacking,
}


class OfTexts(ShuffledOnce):
    """Takes the order of a set of texts, which hangs on the seed of Python's hashes, besides."""

    def shift(self, *place: int) -> float:
        return super().shift(*place) + hash("text") % 97
