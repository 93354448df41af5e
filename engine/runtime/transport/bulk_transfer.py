"""Bulk transfers: many tensors under one key, sent as bytes in chunks of bounded size; the receiver knows the specs.

Small tensors are copied into common chunks. A large tensor is sent in slices of its own memory, without a copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from engine.runtime.transport.tensor_spec import Border, TensorSpec, bytes_of
from engine.runtime.transport.transport import AnyKey, Channel

_LARGE = 1 << 20  # bytes from which a tensor has chunks of its own
_CHUNK = 16 << 20  # maximum bytes of a chunk

ByteRange = tuple[int, int, int]  # (tensor, first byte, end byte)


def chunks_of(sizes: Sequence[int]) -> list[list[ByteRange]]:
    """Returns the parts of each chunk for tensors of these sizes in bytes; sender and receiver compute the same."""
    chunks: list[list[ByteRange]] = []
    together: list[ByteRange] = []
    for index, size in enumerate(sizes):
        if size >= _LARGE:
            chunks += [[(index, start, min(start + _CHUNK, size))] for start in range(0, size, _CHUNK)]
        elif size:
            if together and sum(end for _, _, end in together) + size > _CHUNK:
                chunks.append(together)
                together = []
            together.append((index, 0, size))
    return [*chunks, together] if together else chunks


def send_bulk(channel: Channel[AnyKey], targets: Iterable[int], key: AnyKey, tensors: Sequence[Tensor]) -> None:
    """Starts a bulk transfer to each target; all tensors lie on one device.

    They must not change before the commit of the step.
    """
    payload = [bytes_of(tensor.detach().contiguous()) for tensor in tensors]
    payloads = [
        channel.device.copies.fetched((_joined([payload[index][start:end] for index, start, end in chunk]),))
        for chunk in chunks_of([len(each) for each in payload])
    ]
    for target in targets:
        for chunk in payloads:
            channel.send(target, key, chunk)


def post_bulk(channel: Channel[AnyKey], source: int, key: AnyKey, specs: Sequence[TensorSpec]) -> bool:
    """Posts the first receive of a bulk transfer ahead of `receive_bulk`; returns whether it is the only one."""
    chunks = chunks_of([math.prod(spec.shape) * spec.dtype.itemsize for spec in specs])
    if chunks:
        channel.post(source, key, _border_of(chunks[0]))
    return len(chunks) < 2


def receive_bulk(
    channel: Channel[AnyKey], source: int, key: AnyKey, specs: Sequence[TensorSpec], is_posted: bool = False
) -> list[Tensor]:
    """Waits for a bulk transfer from `source`, which `post_bulk` may have posted; returns its tensors, contiguous."""
    found = dict(arriving(channel, source, key, specs, is_posted))
    return [found[index] for index in range(len(specs))]


def arriving(
    channel: Channel[AnyKey], source: int, key: AnyKey, specs: Sequence[TensorSpec], is_posted: bool = False
) -> Iterator[tuple[int, Tensor]]:
    """Yields each tensor of a bulk transfer with its index as soon as it is whole, large ones first.

    So a receiver that puts each in its place, and forgets it, holds one tensor and one chunk beside.
    """
    sizes = [math.prod(spec.shape) * spec.dtype.itemsize for spec in specs]
    yield from ((index, specs[index].empty(channel.device)) for index, size in enumerate(sizes) if size == 0)
    tensor: Tensor | None = None
    for number, chunk in enumerate(chunks_of(sizes)):
        if number or not is_posted:
            channel.post(source, key, _border_of(chunk))
        (arrived,) = channel.take(source, key)
        at = 0
        for index, start, end in chunk:
            tensor = specs[index].empty(channel.device) if tensor is None else tensor
            bytes_of(tensor)[start:end] = arrived[at : at + end - start]
            at += end - start
            if end == sizes[index]:
                yield index, tensor
                tensor = None
        del arrived  # before the next chunk comes


def _border_of(chunk: Sequence[ByteRange]) -> Border:
    return (TensorSpec((sum(end - start for _, start, end in chunk),), torch.uint8, False),)


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
