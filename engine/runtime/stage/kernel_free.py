"""Forwards without kernels: an op makes the node of its backward and outputs of the right shape, with any content.

This is what torch's `FakeTensorMode` does, in a quarter of its time: tensors stay tensors of their device. Views are
views, what is made of no tensor is made, and other ops only take memory, which nobody touches. Who uses a graph made
this way has to compare it with a real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from engine.runtime.device.action_clock import OperationMode

_OF_A_NUMBER = 16  # bytes, at most


class ContentNeededError(Exception):
    """A forward needs the content of a tensor; the text says which op."""


class KernelFree(OperationMode):
    """While it is entered, ops run no kernel; an op that needs the content of a tensor raises ContentNeededError."""

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[torch.UntypedStorage] = []  # small ones, so that no other gets their address

    def is_number(self, tensor: Tensor) -> bool:
        """Says whether the content of this tensor is that of a real forward: a single number that the code names."""
        storage = tensor.untyped_storage()
        is_single = tensor.dim() == 0 and storage.nbytes() == tensor.itemsize
        return is_single and storage.data_ptr() not in {each.data_ptr() for each in self._kept}

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Returns what the op returns, without its content."""
        arguments, schema = dict(kwargs or {}), func._schema
        if torch.Tag.data_dependent_output in func.tags:
            raise ContentNeededError(f"{schema.name} looks at the content of a tensor")
        tensors = [each for each in tree_leaves((args, arguments)) if isinstance(each, Tensor)]
        is_any = torch.Tag.nondeterministic_seeded in func.tags or schema.name.startswith("aten::empty")
        if _is_view(func) or not (tensors or is_any) or not any("Tensor" in str(each.type) for each in schema.returns):
            return func(*args, **arguments)
        if schema.is_mutable:
            written = [_written(schema, each, args, arguments) for each in schema.returns]
            return written[0] if len(written) == 1 else tuple(written)
        place = arguments.get("device") or next((each.device for each in tensors if each.dim()), None)
        place = place or (tensors[0].device if tensors else torch.get_default_device())
        if "device" in arguments or any(each.name == "device" for each in schema.arguments):
            arguments["device"] = "meta"
        shapes = _shapes_of(func, args, arguments)
        return tree_map(lambda value: self._allocated(value, place) if isinstance(value, Tensor) else value, shapes)

    def _allocated(self, like: Tensor, place: torch.device) -> Tensor:
        tensor = allocated(like.size(), like.stride(), like.dtype, place, int(like.storage_offset()))
        storage = tensor.untyped_storage()
        self._kept += [storage] if storage.nbytes() <= _OF_A_NUMBER else []
        return tensor


def allocated(
    size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, place: torch.device, offset: int = 0
) -> Tensor:
    """Returns a tensor with any content, which is not filled where all is deterministic, as `torch.empty` is."""
    last = sum((each - 1) * step for each, step in zip(size, stride, strict=True))
    num_bytes = 0 if 0 in size else (offset + last + 1) * dtype.itemsize
    empty = torch.empty(0, dtype=dtype, device=place)
    return empty.set_(torch.UntypedStorage(num_bytes, device=place), offset, tuple(size), tuple(stride))


def _is_view(func: Any) -> bool:
    is_alias = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
    return is_alias or torch.Tag.inplace_view in func.tags


def _written(schema: Any, returned: Any, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> Any:
    """Returns the argument that an op returns when it has written to it."""
    for number, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.before_set == returned.alias_info.before_set:
            return args[number] if number < len(args) else arguments[argument.name]
    raise ContentNeededError(f"{schema.name} writes to an argument, and returns another tensor")


_shapes: dict[Any, Any] = {}  # by op and arguments: layers of a kind ask the same, and to compute them takes long
_MOST_SHAPES = 10_000


def _shapes_of(func: Any, args: tuple[Any, ...], arguments: Mapping[str, Any]) -> Any:
    leaves, form = tree_flatten((args, arguments))
    key = (func, str(form), tuple(map(_described, leaves)))
    if key not in _shapes:
        if len(_shapes) > _MOST_SHAPES:
            _shapes.clear()
        _shapes[key] = func(*tree_map(_without_content, args), **tree_map(_without_content, arguments))
    return _shapes[key]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.size(), value.stride(), value.dtype
    return type(value), value


def _without_content(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
