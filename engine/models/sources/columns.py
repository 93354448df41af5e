"""Samples and microbatches that are mappings of columns, such as ``{"input_ids": ..., "labels": ...}``.

Rules: the target is the first of `TARGETS` that is there. A column that has no numbers, such as a text, is left out.
The other columns are the inputs, and the first layer takes them by name (`engine.models.data.Columns`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from engine.models.data import Columns
from engine.models.layers import Batch

TARGETS = ("labels", "label", "targets", "target", "y")


def collate_columns(samples: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns the columns of samples, stacked; raises ValueError for a column whose rows have several shapes."""
    first = {name: tensor for name, value in samples[0].items() if (tensor := _tensor(value)) is not None}
    return {name: _stacked(name, [torch.as_tensor(each[name]) for each in samples]) for name in first}


def batch_of(columns: Mapping[str, Any]) -> tuple[Columns, Batch]:
    """Returns a microbatch of columns, and the names of its inputs; raises TypeError without a target."""
    tensors = {name: value for name, value in columns.items() if isinstance(value, Tensor)}
    target = next((name for name in TARGETS if name in tensors), None)
    if target is None or len(tensors) < 2:
        expected = f"a column of targets ({', '.join(TARGETS)}) and one of inputs"
        found = ", ".join(tensors) or "no column of numbers"
        raise TypeError(f"the data: expected {expected}, found {found}; a collate function can name them")
    return Columns(tuple(tensors), target), Batch(tuple(tensors.values()), (tensors[target],))


def named_inputs(inputs: Mapping[str, Any], targets: tuple[Tensor, ...]) -> tuple[Columns, Batch]:
    """Returns a microbatch of named inputs beside its targets."""
    tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
    return Columns(tuple(tensors), ""), Batch(tuple(tensors.values()), targets)


def _tensor(value: Any) -> Tensor | None:
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError):
        return None


def _stacked(name: str, rows: Sequence[Tensor]) -> Tensor:
    other = next((each for each in rows if each.shape != rows[0].shape), None)
    if other is not None:
        shapes = f"{list(rows[0].shape)} and {list(other.shape)}"
        raise ValueError(f"the column {name!r} has rows of several shapes, {shapes}; a collate function can pad them")
    return torch.stack(list(rows))
