"""Nests: values in dicts, lists, tuples and dataclasses of any depth; all other values are leaves.

A nest can be taken apart into its tensors and its form (the nest without them), and put together again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from typing import Any

from torch import Tensor

from engine.models.layers import Tensors


class _Place(Enum):
    TENSOR = "tensor"  # the place of a tensor in a form


def parts_of(nest: object) -> dict[Any, Any] | None:
    """Returns the parts of a nest by key, index or field name; None for a leaf."""
    if isinstance(nest, dict):
        return nest
    if isinstance(nest, (list, tuple)):
        return dict(enumerate(nest))
    if is_dataclass(nest) and not isinstance(nest, type):
        return {each.name: getattr(nest, each.name) for each in fields(nest) if each.init}
    return None


def with_parts(nest: Any, parts: Iterable[Any]) -> Any:
    """Returns a nest of the same type with other parts, in the order of `parts_of`."""
    if isinstance(nest, dict):
        return type(nest)(zip(nest, parts, strict=True))
    if hasattr(nest, "_fields"):  # a named tuple
        return type(nest)(*parts)
    if isinstance(nest, (list, tuple)):
        return type(nest)(parts)
    return replace(nest, **dict(zip(parts_of(nest) or (), parts, strict=True)))


def map_leaves(do: Callable[[Any], Any], nest: Any) -> Any:
    """Returns the nest with each leaf replaced by `do(leaf)`, called in order."""
    parts = parts_of(nest)
    return do(nest) if parts is None else with_parts(nest, [map_leaves(do, part) for part in parts.values()])


def flatten(nest: object) -> tuple[object, Tensors]:
    """Returns the form of a nest, and its tensors in order."""
    tensors: list[Tensor] = []

    def take(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Place.TENSOR

    return map_leaves(take, nest), tuple(tensors)


def unflatten(form: object, tensors: Tensors) -> Any:
    """Returns the nest of a form with these tensors: the inverse of `flatten`."""
    coming = iter(tensors)
    return map_leaves(lambda leaf: next(coming) if leaf is _Place.TENSOR else leaf, form)
