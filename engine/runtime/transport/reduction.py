"""The reduction over pipelines: a deterministic all-reduce of gradients, and an all-gather of buffers and losses.

Each owner of a stage sums one chunk of all D gradients in pipeline order and sends the sum to the other owners:

    owner 0  sends chunk 1 of its gradient  ->  adds up chunk 0  ->  sends the mean of chunk 0
    owner 1  sends chunk 0 of its gradient  ->  adds up chunk 1  ->  sends the mean of chunk 1

It sends as many bytes as a ring all-reduce, but its result does not depend on ranks or ownership. A worker that owns
the stage in several pipelines contributes several parts. The accumulators are not changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.core.ownership import Ownership
from engine.models.layers import Tensors
from engine.runtime.transport.bulk_transfer import receive_bulk, send_bulk
from engine.runtime.transport.tensor_spec import TensorSpec
from engine.runtime.transport.transfer_key import ProgramKey, ProgramPurpose, program_key
from engine.runtime.transport.transport import Channel


@dataclass(frozen=True, slots=True)
class ReduceGroup:
    """The owners of one stage, from the view of `worker`, one of them."""

    channel: Channel[ProgramKey]
    ownership: Ownership
    worker: int
    stage: int

    @property
    def others(self) -> tuple[int, ...]:
        """The other owners."""
        return tuple(each for each in self.ownership.owners_of(self.stage) if each != self.worker)

    def pipelines(self, worker: int) -> tuple[int, ...]:
        """Returns the pipelines in which a worker owns the stage."""
        return self.ownership.pipelines_of(worker, self.stage)

    def key(self, purpose: ProgramPurpose, pipeline: int, index: int = 0) -> ProgramKey:
        """Returns the key of a transfer from the owner of the stage in `pipeline`."""
        return program_key(self.ownership.grid, purpose, pipeline, self.stage, index)


def mean_over_pipelines(group: ReduceGroup, parts: Mapping[int, Sequence[Tensor]]) -> list[Tensor]:
    """Returns the mean over all pipelines of a stage's gradients; `parts` has those of the pipelines owned here.

    A collective: every owner of the stage must call it. With one pipeline the mean is the part itself, not a copy.
    """
    gradients = list(next(iter(parts.values())))
    if group.ownership.grid.pipelines == 1:
        return gradients
    dtypes = list(dict.fromkeys(gradient.dtype for gradient in gradients if gradient.numel()))
    for index, dtype in enumerate(dtypes):
        places = [place for place, gradient in enumerate(gradients) if gradient.dtype == dtype]
        of_dtype = {pipeline: [part[place] for place in places] for pipeline, part in parts.items()}
        for place, mean in zip(places, _mean_of_one_dtype(group, of_dtype, index), strict=True):
            gradients[place] = mean
    return gradients


def _mean_of_one_dtype(group: ReduceGroup, parts: Mapping[int, Sequence[Tensor]], index: int) -> list[Tensor]:
    owners = group.ownership.owners_of(group.stage)
    like = next(iter(parts.values()))
    size = sum(gradient.numel() for gradient in like)
    chunk_size = -(-size // len(owners))
    padding = like[0].new_zeros(chunk_size * len(owners) - size)
    chunks = {
        pipeline: torch.cat([*(gradient.reshape(-1) for gradient in part), padding]).split(chunk_size)
        for pipeline, part in parts.items()
    }
    border = (TensorSpec((chunk_size,), like[0].dtype, False),)
    for other in group.others:
        for pipeline in group.pipelines(other):
            group.channel.post(other, group.key(ProgramPurpose.SCATTER, pipeline, index), border)
        group.channel.post(other, group.key(ProgramPurpose.GATHER, group.pipelines(other)[0], index), border)
    for other in group.others:
        for pipeline, mine in chunks.items():
            group.channel.send(other, group.key(ProgramPurpose.SCATTER, pipeline, index), (mine[owners.index(other)],))
    total = _summed_chunk(group, {each: mine[owners.index(group.worker)] for each, mine in chunks.items()}, index)
    for other in group.others:
        group.channel.send(other, group.key(ProgramPurpose.GATHER, group.pipelines(group.worker)[0], index), (total,))
    sums = {group.worker: total}
    for other in group.others:
        (sums[other],) = group.channel.take(other, group.key(ProgramPurpose.GATHER, group.pipelines(other)[0], index))
    whole = torch.cat([sums[owner] for owner in owners])[:size]
    return [
        part.view(gradient.shape)
        for part, gradient in zip(whole.split([gradient.numel() for gradient in like]), like, strict=True)
    ]


def _summed_chunk(group: ReduceGroup, mine: Mapping[int, Tensor], index: int) -> Tensor:
    """Returns the mean of one chunk over all pipelines, added in pipeline order."""
    parts = dict(mine)
    for other in group.others:
        for pipeline in group.pipelines(other):
            (parts[pipeline],) = group.channel.take(other, group.key(ProgramPurpose.SCATTER, pipeline, index))
    total = parts[0].clone()
    for pipeline in range(1, len(parts)):
        total += parts[pipeline]
    total /= len(parts)
    return total


def gather_over_pipelines(group: ReduceGroup, parts: Mapping[int, Tensors]) -> tuple[Tensors, ...]:
    """Returns the tensors of all pipelines, in pipeline order; `parts` has those of the pipelines owned here.

    A collective: every owner of the stage must call it. For small tensors: each owner sends its parts to all others.
    """
    found = dict(parts)
    for pipeline, part in parts.items():
        send_bulk(group.channel, group.others, group.key(ProgramPurpose.ENDING, pipeline), part)
    specs = [TensorSpec.of(tensor) for tensor in part]
    for other in group.others:
        for pipeline in group.pipelines(other):
            found[pipeline] = tuple(
                receive_bulk(group.channel, other, group.key(ProgramPurpose.ENDING, pipeline), specs)
            )
    return tuple(found[pipeline] for pipeline in range(len(found)))
