"""A finite data set as a pure source: `indexed` takes any map-style data set, with ``__len__`` and ``__getitem__``.

    from engine.models.indexed import indexed

    def mine(seed):
        return indexed(training, {"validation": held_out, "test": other}, seed=seed)

Every sample is trained once in every pass over the training set, in an order that the seed and the pass decide
(`engine.core.samples.ledger`). No order is kept in memory, so that a run can go on at any step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engine.core.errors import Problem, UserError
from engine.models.data import DataFacts


class MapStyle(Protocol):
    """A data set whose samples have numbers from 0 on, such as a torch.utils.data.Dataset."""

    def __len__(self) -> int:
        """Returns the number of samples."""

    def __getitem__(self, number: int, /) -> Any:
        """Returns one sample."""


Collate = Callable[[list[Any]], Any]
ONLY = "validation"  # the name of the evaluation set of a source that has one


@dataclass(frozen=True, slots=True)
class Indexed:
    """The result of `indexed`, before the job is known; a field that is None comes from the job or from a sample."""

    training: MapStyle
    evaluations: Mapping[str, MapStyle]
    facts: DataFacts | None
    seed: int | None
    collate: Collate | None
    draws: bool


def indexed(
    training: MapStyle,
    validation: MapStyle | Mapping[str, MapStyle] | None = None,
    facts: DataFacts | None = None,
    *,
    seed: int | None = None,
    collate: Collate | None = None,
    draws: bool = False,
) -> Indexed:
    """Makes a source of microbatches from a data set to train on, and sets by name that training never sees.

    A sample is a pair of inputs and targets, each a tensor, a number or a sequence of them; or a mapping of columns.
    `collate` makes a microbatch of a list of samples: such a pair or mapping, or a Batch. `facts` are read off the
    first microbatch, and `seed` is the job's, unless they are given. With `draws`, reading a training sample may draw
    from the random streams of the process (torch's, Python's and numpy's), as augmentations do: each sample of each
    pass has a key. Raises UserError if a data set is empty.
    """
    named = {} if validation is None else validation if isinstance(validation, Mapping) else {ONLY: validation}
    for name, each in {"training": training, **named}.items():
        if not len(each):
            raise UserError([Problem("data", f"at least one sample in the {name} set", "an empty one")])
    return Indexed(training, dict(named), facts, seed, collate, draws)
