"""The rows of a microbatch that count: the last one of an evaluation set may have fewer samples than rows.

Its other rows are filled with samples from the begin of the set, which the first microbatch has too. So the rows of
these samples tell whether dimension 0 is the sample: outputs may have as many rows for another reason, such as time.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.errors import Problem, UserError
from engine.core.samples.evaluation import EvaluationPart
from engine.models.layers import Tensors
from engine.models.losses import shapes_of

_NEAR, _NEAR_NARROW = 1e-2, 5e-2  # of the largest; a kernel may round the rows of a matrix in other ways
_EXPECTED = "outputs and targets with one row per sample"


class EvaluatedBatch(NamedTuple):
    """The outputs and targets of an evaluation microbatch."""

    outputs: Tensors
    targets: Tensors

    def first(self, part: EvaluationPart, size: int, begin: EvaluatedBatch, *, is_narrow: bool) -> EvaluatedBatch:
        """Returns the rows of the samples of a part that count, of `size`; `begin` is the first microbatch of its set.

        Raises UserError for tensors whose rows are no samples.
        """
        for name, ours, theirs in zip(self._fields, self, begin, strict=True):
            near = _NEAR_NARROW if is_narrow else _NEAR
            for number, (each, of_begin) in enumerate(zip(ours, theirs, strict=True)):
                if why := _why_no_samples(each, of_begin, size, part.rows, near if name == "outputs" else 0.0):
                    raise _refusal(part, f"{name}[{number}] {shapes_of((each,))}, {why}")
        return EvaluatedBatch(*(tuple(each[: part.rows] for each in tensors) for tensors in self))


def _why_no_samples(last: Tensor, begin: Tensor, size: int, rows: int, near: float) -> str:
    """Returns why dimension 0 is not the sample, in words; empty if it is."""
    if not last.dim() or last.shape != begin.shape or last.shape[0] != size:
        return f"which has not {size} rows"
    again, before = last[rows:], begin[: size - rows]
    return "" if _are_near(again, before, near) else f"whose row {rows} is not that of the same sample elsewhere"


def _are_near(one: Tensor, other: Tensor, near: float) -> bool:
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = other.abs()[other.abs().isfinite()]
    return torch.allclose(one, other, near, near * float(finite.max() if finite.numel() else 0.0), equal_nan=True)


def _refusal(part: EvaluationPart, found: str) -> UserError:
    hint = (
        f"--validation-microbatches {part.number} measures whole microbatches only"
        if part.number
        else "a smaller microbatch_size"
    )
    where = f"in the last microbatch of the evaluation set {part.name}, of {part.rows} samples"
    return UserError([Problem("validation_microbatches", _EXPECTED, f"{found}, {where}", hint)])
