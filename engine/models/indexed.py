"""A finite data set as a pure source: `indexed` takes any map-style data set, with ``__len__`` and ``__getitem__``.

    from engine.models.indexed import indexed

    def mine(seed):
        return indexed(training, validation, DataFacts(task="classify", num_classes=10, features=32), seed=seed)

Every sample is trained once in every pass over the training set, in an order that the seed and the pass decide
(`engine.core.samples.ledger`). No order is kept in memory, so that a run can go on at any step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import default_collate

from engine.core.errors import Problem, UserError
from engine.models.data import DataFacts


class MapStyle(Protocol):
    """A data set whose samples have numbers from 0 on, such as a torch.utils.data.Dataset."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, number: int, /) -> Any:
        """Returns one sample."""


Collate = Callable[[list[Any]], Any]


@dataclass(frozen=True, slots=True)
class Indexed:
    """The result of `indexed`, before the job is known."""

    training: MapStyle
    validation: MapStyle
    facts: DataFacts
    seed: int
    collate: Collate
    draws: bool


def indexed(
    training: MapStyle,
    validation: MapStyle,
    facts: DataFacts,
    *,
    seed: int,
    collate: Collate = default_collate,
    draws: bool = False,
) -> Indexed:
    """Makes a source of microbatches from two data sets: one to train on, one that training never sees.

    A sample is a pair of inputs and targets, each a tensor, a number or a sequence of them. `collate` makes a
    microbatch of a list of samples: such a pair, or a Batch. With `draws`, reading a training sample may draw from the
    random streams of the process (torch's, Python's and numpy's), as augmentations do: each sample of each pass has a
    key. Raises UserError if a data set is empty.
    """
    for name, each in (("training", training), ("validation", validation)):
        if not len(each):
            raise UserError([Problem("data", f"at least one sample in the {name} set", "an empty one")])
    return Indexed(training, validation, facts, seed, collate, draws)
