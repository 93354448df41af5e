"""Splits a nest of arguments into equal microbatches, and merges their outputs.

A spec gives the treatment of each leaf. It is a mark, which holds for all leaves below it; or a nest with the same keys
as the value and a spec for each part; or None, the default: tensors are split along dimension 0, other leaves are
replicated. Rule: parts have equal sizes, because the loss of a step is the mean over its microbatches.
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
    """A mark: tensors are split and concatenated along dimension `dim`; other leaves are replicated."""

    dim: int = 0


class Mark(Enum):
    """The other marks."""

    REPLICATE = "replicate"  # every microbatch gets the whole leaf; their outputs must be equal
    MEAN = "mean"  # merges numbers and tensors by their mean; cannot split
    SUM = "sum"  # merges numbers and tensors by their sum; cannot split


Spec = Any  # Chunk | Mark | None | a nest of specs


def split(nest: Any, spec: Spec, count: int, length: int | None = None) -> list[Any]:
    """Returns the part of each of `count` microbatches of a nest such as (args, kwargs): a nest of views.

    Raises ValueError with the leaf that cannot be split by its spec, or whose size along the split is not `length`.
    """
    return _split(nest, spec, count, length, "batch")


def merge(outputs: Sequence[Any], spec: Spec = None) -> Any:
    """Returns the outputs of the microbatches as one output; raises ValueError if their forms or shapes differ."""
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
    """Returns the spec of each part of a nest."""
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
