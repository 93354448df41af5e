"""A nest of arguments is split into equal microbatches, and what came of them is merged.

A spec says what becomes of each leaf. It is a mark, for everything below where it stands; or a nest with the same keys
as the value, with a spec for each part; or None, the default: tensors are chunked along dimension 0, anything else is
the same in every microbatch. Rule: parts are of equal size, since a step's loss is the mean of microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from engine.models.nests import parts_of, with_parts


@dataclass(frozen=True, slots=True)
class Chunk:
    """A mark: tensors are cut along a dimension, and joined along it; what is no tensor is the same everywhere."""

    dim: int = 0


class Mark(Enum):
    """What else may become of a leaf."""

    REPLICATE = "replicate"  # every microbatch gets the whole; what comes of them must be equal
    MEAN = "mean"  # of numbers and tensors; only to merge. As the loss of a step is made of those of its microbatches
    SUM = "sum"  # likewise


Spec = Any  # Chunk | Mark | None | a nest of specs


def split(nest: Any, spec: Spec, count: int, length: int | None = None) -> list[Any]:
    """Returns what each of `count` microbatches gets of a nest, such as (args, kwargs): the same nest of views.

    Raises ValueError that names the part that cannot be split so, or that is not of the `length` asked for where it is
    cut.
    """
    return _split(nest, spec, count, length, "batch")


def merge(outputs: Sequence[Any], spec: Spec = None) -> Any:
    """Returns what the microbatches gave as one, in their order; raises ValueError where it does not fit together."""
    return _merge(outputs, spec, "output")


def _split(value: Any, spec: Spec, count: int, length: int | None, where: str) -> list[Any]:
    parts = parts_of(value)
    if parts is not None:
        specs = _specs(parts, spec, where)
        columns = [_split(part, specs[key], count, length, f"{where}.{key}") for key, part in parts.items()]
        return [with_parts(value, [column[index] for column in columns]) for index in range(count)]
    mark = _mark(value, spec, where)
    if mark is Mark.REPLICATE:
        return [value] * count
    if not isinstance(mark, Chunk):
        raise ValueError(f"{where}: {mark} merges, it does not split")
    size = _size(value, mark.dim, where)
    if length not in (None, size):
        raise ValueError(f"{where}: expected {length} along dimension {mark.dim}, found {size}")
    if size % count or not size:
        raise ValueError(f"{where}: expected a multiple of {count} along dimension {mark.dim}, found {size}")
    return list(value.split(size // count, mark.dim))


def _merge(values: Sequence[Any], spec: Spec, where: str) -> Any:
    first, parts = values[0], parts_of(values[0])
    if parts is not None:
        every = [parts_of(value) for value in values]
        if any(each is None or each.keys() != parts.keys() for each in every):
            raise ValueError(f"{where}: expected the same form from every microbatch")
        specs = _specs(parts, spec, where)
        merged = [_merge([each[key] for each in every if each], specs[key], f"{where}.{key}") for key in parts]
        return with_parts(first, merged)
    mark = _mark(first, spec, where)
    if isinstance(mark, Chunk):
        _size(first, mark.dim, where)
        return torch.cat(list(values), mark.dim)
    if mark is Mark.REPLICATE:
        if not all(_is_equal(first, value) for value in values):
            raise ValueError(f"{where}: expected the same from every microbatch")
        return first
    if not isinstance(first, Tensor):
        return fmean(values) if mark is Mark.MEAN else math.fsum(values)
    total = first.clone()
    for value in values[1:]:
        total += value
    return total / len(values) if mark is Mark.MEAN else total


def _specs(parts: dict[Any, Any], spec: Spec, where: str) -> dict[Any, Spec]:
    """Returns the spec of each part."""
    if spec is None or isinstance(spec, (Chunk, Mark)):
        return dict.fromkeys(parts, spec)
    found = parts_of(spec)
    if found is None or found.keys() != parts.keys():
        expected = ", ".join(map(str, parts)) or "nothing"
        raise ValueError(f"{where}: expected a spec for {expected}, found {spec!r}")
    return found


def _mark(leaf: Any, spec: Spec, where: str) -> Chunk | Mark:
    if not isinstance(leaf, (Tensor, int, float)):
        return Mark.REPLICATE
    if spec is None:
        return Chunk() if isinstance(leaf, Tensor) and leaf.dim() else Mark.REPLICATE
    if not isinstance(spec, (Chunk, Mark)):
        raise ValueError(f"{where}: expected a mark such as Chunk(0), found {spec!r}")
    return Mark.REPLICATE if isinstance(spec, Chunk) and not isinstance(leaf, Tensor) else spec


def _size(tensor: Tensor, dim: int, where: str) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        raise ValueError(f"{where}: expected a tensor with a dimension {dim}, found shape {list(tensor.shape)}")
    return tensor.shape[dim]


def _is_equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and torch.equal(one, other)
    return bool(one == other)
