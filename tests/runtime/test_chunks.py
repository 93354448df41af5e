"""Microbatches of nested arguments: against torch, and beyond."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from engine.models.data import Chunk, Mark, split
from tests.looped import looped


@dataclass(frozen=True)
class Sample:
    image: Tensor
    name: str = "x"


class Pair(NamedTuple):
    one: Any
    two: Any


def arange(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def is_same(one: Any, other: Any) -> bool:
    """Says whether two nests are the same, bit for bit and kind for kind."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Sample):
        return isinstance(other, Sample) and one.name == other.name and is_same(one.image, other.image)
    if isinstance(one, dict):
        return type(one) is type(other) and one.keys() == other.keys() and all(is_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(is_same, one, other))
    return bool(one == other)


ARGS = (arange(8, 3), [arange(3, 4), {"deep": Pair(arange(4, 2), (arange(8), 7))}])
KWARGS = {"mask": arange(2, 8), "scale": 2.5, "empty": {}}
D0, D1 = Chunk(0), Chunk(1)


def peer() -> Any:
    """Returns the module of torch; its import takes longer than all tests of this file, which only one process runs."""
    return importlib.import_module("torch.distributed.pipelining.microbatch")


def as_torch(spec: Any) -> Any:
    if isinstance(spec, Chunk):
        return peer().TensorChunkSpec(spec.dim)
    if spec is Mark.REPLICATE:
        return peer()._Replicate()
    if isinstance(spec, dict):
        return {key: as_torch(each) for key, each in spec.items()}
    return type(spec)(*map(as_torch, spec)) if isinstance(spec, Pair) else type(spec)(map(as_torch, spec))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_nested_arguments_are_split_as_by_torch(count: int) -> None:
    nested = (D0, [D1, {"deep": Pair(D0, (D0, Mark.REPLICATE))}])
    named = {"mask": D1, "scale": Mark.REPLICATE, "empty": {}}
    mine = split((ARGS, KWARGS), (nested, named), count)
    args, kwargs = peer().split_args_kwargs_into_chunks(ARGS, KWARGS, count, as_torch(nested), as_torch(named))
    assert len(mine) == count
    assert is_same(mine, list(zip(args, kwargs, strict=True)))


def test_by_default_tensors_are_cut_along_dimension_0_as_by_torch() -> None:
    args, named = (arange(4, 2), [arange(4), 3]), {"mask": arange(4, 1, 2), "flag": True}
    torch_args, torch_kwargs = peer().split_args_kwargs_into_chunks(args, named, 4)
    assert is_same(split((args, named), None, 4), list(zip(torch_args, torch_kwargs, strict=True)))


def test_parts_of_a_dataclass_are_cut_by_their_names() -> None:
    value = {"samples": [Sample(arange(6, 2), "a"), Sample(arange(3, 6), "b")], "lr": torch.tensor(0.5)}
    parts = split(value, {"samples": [D0, {"image": D1, "name": None}], "lr": None}, 3)
    assert [part["samples"][1].image.shape for part in parts] == [(3, 2)] * 3
    assert [part["samples"][1].name for part in parts] == ["b"] * 3
    assert is_same([part["lr"] for part in parts], [value["lr"]] * 3)


@looped(
    ("value", "spec", "told"),
    [
        ({"x": [arange(5)]}, None, r"batch\.x\.0: expected a multiple of 2 along dimension 0, found 5"),
        ((arange(0, 2),), None, r"batch\.0: expected a multiple of 2 along dimension 0, found 0"),
        ((arange(4),), Chunk(1), r"batch\.0: expected a tensor with a dimension 1, found shape \[4\]"),
        ({"a": 1, "b": 2}, {"a": None}, r"batch: expected a spec for a, b, found"),
        ((arange(4),), ([None],), r"batch\.0: expected a mark such as Chunk\(0\), found \[None\]"),
        ((arange(4),), 0, r"batch: expected a spec for 0, found 0"),
    ],
)
def test_what_cannot_be_split_is_told_by_its_place(value: Any, spec: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        split(value, spec, 2)
