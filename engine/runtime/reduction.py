"""The reduction of gradients over pipelines: summed in pipeline order, out of place.

Each of the D owners of a stage sums one chunk of all D gradients, in pipeline order, and sends the sum to the others:
the bytes of a ring all-reduce, but a result that does not depend on ranks. The local gradients stay intact until the
result is whole.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.ownership import Ownership
from engine.runtime.plane import DataPlane
from engine.runtime.tensor_spec import TensorSpec
from engine.runtime.transfers import Kind, transfer_key


def mean_over_pipelines(
    plane: DataPlane, ownership: Ownership, pipeline: int, stage: int, gradients: list[Tensor]
) -> list[Tensor]:
    """Returns the mean of the pipelines' gradients of a stage; every owner of the stage must call it."""
    if ownership.grid.pipelines == 1:
        return gradients
    reduced = list(gradients)
    dtypes = list(dict.fromkeys(gradient.dtype for gradient in gradients if gradient.numel()))
    for index, dtype in enumerate(dtypes):
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        means = _mean_of_one_dtype(plane, ownership, pipeline, stage, index, [gradients[place] for place in places])
        for place, mean in zip(places, means, strict=True):
            reduced[place] = mean
    return reduced


def _mean_of_one_dtype(
    plane: DataPlane, ownership: Ownership, pipeline: int, stage: int, index: int, gradients: list[Tensor]
) -> list[Tensor]:
    num_pipelines = ownership.grid.pipelines
    flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    chunk_size = -(-flat.numel() // num_pipelines)
    padded = torch.nn.functional.pad(flat, (0, chunk_size * num_pipelines - flat.numel()))
    chunks = list(padded.split(chunk_size))
    others = {each: ownership.owner(each, stage) for each in range(num_pipelines) if each != pipeline}
    border = (TensorSpec((chunk_size,), flat.dtype, False),)

    def key(kind: Kind, sender: int) -> int:
        return transfer_key(ownership.grid, kind, sender, stage, index)

    for other, worker in others.items():
        plane.post(worker, key(Kind.SCATTER, other), border)
        plane.post(worker, key(Kind.GATHER, other), border)
    for other, worker in others.items():
        plane.send(worker, key(Kind.SCATTER, pipeline), (chunks[other],))
    parts = {other: plane.take(worker, key(Kind.SCATTER, other))[0] for other, worker in others.items()}
    parts[pipeline] = chunks[pipeline]
    total = parts[0].clone()
    for each in range(1, num_pipelines):
        total += parts[each]
    total /= num_pipelines
    for worker in others.values():
        plane.send(worker, key(Kind.GATHER, pipeline), (total,))
    chunks[pipeline] = total
    for other, worker in others.items():
        chunks[other] = plane.take(worker, key(Kind.GATHER, other))[0]
    whole = torch.cat(chunks)[: flat.numel()]
    return [
        part.view_as(gradient)
        for part, gradient in zip(whole.split([gradient.numel() for gradient in gradients]), gradients, strict=True)
    ]
