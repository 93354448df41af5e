"""The same data twice, as users write them: whole batches of nested arguments, and microbatches cut by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from engine.core.random_key import random_key
from engine.models.data import Chunk, DataFacts, DataSets, Mark, WholeBatch, indexed
from engine.models.layers import Batch

FEATURES = 8
MICROBATCHES = 4
VALIDATION_MICROBATCHES = 2


class Batches:
    """Whole batches: a tensor beside a number, one for all samples, and one whose samples are its columns."""

    facts = DataFacts(task="regress", features=FEATURES, outputs=1)
    spec = WholeBatch(args=((None, None),), targets=None, kwargs={"more": {"shift": Mark.REPLICATE, "mask": Chunk(1)}})

    def __init__(self, seed: int):
        self.seed = seed

    def batch(self, step: int, pipeline: int, size: int) -> WholeBatch:
        generator = torch.Generator().manual_seed(random_key(self.seed, "batch", step, pipeline))
        x, shift, mask, y = (
            torch.randn(shape, generator=generator)
            for shape in ((size, FEATURES), (FEATURES,), (FEATURES, size), (size, 1))
        )
        return WholeBatch(((x, 2),), {"y": y}, {"more": {"shift": shift, "mask": mask}})

    def validation_batch(self, size: int) -> WholeBatch:
        return self.batch(-1, 0, size)


class Microbatches:
    """Cuts each batch by hand, and gives the tensors one after the other."""

    facts = Batches.facts

    def __init__(self, seed: int):
        self.whole = Batches(seed)

    def microbatch(self, step: int, pipeline: int, microbatch: int, size: int) -> Batch:
        return self._cut(self.whole.batch(step, pipeline, MICROBATCHES * size), microbatch, size)

    def validation(self, index: int, size: int) -> Batch:
        return self._cut(self.whole.validation_batch(VALIDATION_MICROBATCHES * size), index, size)

    def _cut(self, whole: WholeBatch, index: int, size: int) -> Batch:
        rows = slice(index * size, (index + 1) * size)
        ((x, _),), more = whole.args, whole.kwargs["more"]
        return Batch((x[rows].clone(), more["shift"], more["mask"][:, rows].clone()), (whole.targets["y"][rows],))


class RaisesInValidation(Microbatches):
    """Lacks one microbatch of the validation."""

    def __init__(self, seed: int, index: int):
        super().__init__(seed)
        self.index = index

    def validation(self, index: int, size: int) -> Batch:
        if index == self.index:
            raise KeyError("row 77")
        return super().validation(index, size)


class First(nn.Module):
    """Is called as the whole batches are."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, pair: tuple[Tensor, int], *, more: dict[str, Tensor]) -> Tensor:
        x, factor = pair
        made: Tensor = self.linear(x * factor + more["shift"]) * more["mask"].T
        return made


class FirstOfTensors(First):
    """Is called with tensors one after the other."""

    def forward(self, *tensors: Any) -> Tensor:  # type: ignore[override]
        x, shift, mask = tensors
        return super().forward((x, 2), more={"shift": shift, "mask": mask})


def _tied(first: First) -> list[nn.Module]:
    layers = [first, nn.GELU(), nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, 1)]
    layers[2].weight = first.linear.weight
    return layers


def nested() -> list[nn.Module]:
    """Makes a model for whole batches."""
    return _tied(First())


def flat() -> list[nn.Module]:
    """Makes the same for tensors one after the other."""
    return _tied(FirstOfTensors())


class Points:
    """A map-style data set of random vectors, the same in every process."""

    def __init__(self, length: int, seed: int):
        generator = torch.Generator().manual_seed(seed)
        self.inputs = torch.randn(length, FEATURES, generator=generator)
        self.targets = self.inputs.sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return self.inputs[number], self.targets[number]


NUM_POINTS = 37


def points(seed: int) -> DataSets:
    """Returns a finite source."""
    facts = DataFacts(task="regress", features=FEATURES, outputs=1)
    return indexed(Points(NUM_POINTS, 1), Points(5, 2), facts, seed=seed)


def sets() -> dict[str, Points]:
    """Returns data sets by name, none of which fills its last microbatch."""
    return {"train": Points(NUM_POINTS, 1), "validation": Points(7, 2), "test": Points(5, 3)}
