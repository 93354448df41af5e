"""Trees: values in dicts, lists, tuples and dataclasses of any depth; all other values are leaves.

A tree can be flattened into its tensors and its form (the tree without them), and unflattened.
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


def parts_of(tree: object) -> dict[Any, Any] | None:
    """Returns the parts of a tree by key, index or field name; None for a leaf."""
    if isinstance(tree, dict):
        return tree
    if isinstance(tree, (list, tuple)):
        return dict(enumerate(tree))
    if is_dataclass(tree) and not isinstance(tree, type):
        return {each.name: getattr(tree, each.name) for each in fields(tree) if each.init}
    return None


def with_parts(tree: Any, parts: Iterable[Any]) -> Any:
    """Returns a tree of the same type with other parts, in the order of `parts_of`."""
    if isinstance(tree, dict):
        return type(tree)(zip(tree, parts, strict=True))
    if hasattr(tree, "_fields"):  # a named tuple
        return type(tree)(*parts)
    if isinstance(tree, (list, tuple)):
        return type(tree)(parts)
    return replace(tree, **dict(zip(parts_of(tree) or (), parts, strict=True)))


def map_leaves(do: Callable[[Any], Any], tree: Any) -> Any:
    """Returns the tree with each leaf replaced by `do(leaf)`, called in order."""
    parts = parts_of(tree)
    return do(tree) if parts is None else with_parts(tree, [map_leaves(do, part) for part in parts.values()])


def flatten(tree: object) -> tuple[object, Tensors]:
    """Returns the form of a tree, and its tensors in order."""
    tensors: list[Tensor] = []

    def take(leaf: object) -> object:
        if not isinstance(leaf, Tensor):
            return leaf
        tensors.append(leaf)
        return _Place.TENSOR

    return map_leaves(take, tree), tuple(tensors)


def unflatten(form: object, tensors: Tensors) -> Any:
    """Returns the tree of a form with these tensors: the inverse of `flatten`."""
    coming = iter(tensors)
    return map_leaves(lambda leaf: next(coming) if leaf is _Place.TENSOR else leaf, form)
