"""Splits a tree of arguments into equal microbatches.

A spec gives the treatment of each leaf. It is a mark, which holds for all leaves below it; or a tree with the same keys
as the value and a spec for each part; or None, the default: tensors are split along dimension 0, other leaves are
replicated. Rule: parts have equal sizes, because the loss of a step is the mean over its microbatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import Tensor

from engine.models.pytree import parts_of, with_parts


@dataclass(frozen=True, slots=True)
class Chunk:
    """A mark: tensors are split along dimension `dim`; other leaves are replicated."""

    dim: int = 0


class Mark(Enum):
    """The other mark."""

    REPLICATE = "replicate"  # every microbatch gets the whole leaf


Spec = Any  # Chunk | Mark | None | a tree of specs


def split(tree: Any, spec: Spec, count: int, length: int | None = None) -> list[Any]:
    """Returns the part of each of `count` microbatches of a tree such as (args, kwargs): a tree of views.

    Raises ValueError with the leaf that cannot be split by its spec, or whose size along the split is not `length`.
    """
    return _split(tree, spec, count, length, "batch")


def _split(value: Any, spec: Spec, count: int, length: int | None, where: str) -> list[Any]:
    parts = parts_of(value)
    if parts is not None:
        specs = _specs(parts, spec, where)
        columns = [_split(part, specs[key], count, length, f"{where}.{key}") for key, part in parts.items()]
        return [with_parts(value, [column[index] for column in columns]) for index in range(count)]
    mark = _mark(value, spec, where)
    if isinstance(mark, Mark):
        return [value] * count
    if not -value.dim() <= mark.dim < value.dim():
        raise ValueError(f"{where}: expected a tensor with a dimension {mark.dim}, found shape {list(value.shape)}")
    size = value.shape[mark.dim]
    if length not in (None, size):
        raise ValueError(f"{where}: expected {length} along dimension {mark.dim}, found {size}")
    if size % count or not size:
        raise ValueError(f"{where}: expected a multiple of {count} along dimension {mark.dim}, found {size}")
    return list(value.split(size // count, mark.dim))


def _specs(parts: dict[Any, Any], spec: Spec, where: str) -> dict[Any, Spec]:
    """Returns the spec of each part of a tree."""
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
