"""A part of a checkpoint: the tensors of one layer, or of one shard of it, as the bytes of a safetensors file.

Rules: a tensor in a file is contiguous. The strides of any other tensor are kept beside the file, because strides can
decide bits. The header is written here, so that the bytes of the tensors are not copied once more; it has the tensors
in the order in which they are given, which is that of their hashes. The package safetensors reads it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from engine.core.checkpoints.manifest import Strides
from engine.core.checkpoints.part_file import DTYPES, StoredLayer, StoredTensor, header_bytes
from engine.core.errors import StorageError
from engine.runtime.stage.buffers import overwrite

_NAMES = {getattr(torch, dtype): name for name, (dtype, _) in DTYPES.items()}
_PAGE = 4096  # bytes: memory that begins at a multiple goes to the disk without another copy


class LayerImage:
    """The bytes of a file in memory that nothing else changes: a header, and behind it copies of tensors.

    It can be filled again with the same tensors of a later step: fresh memory costs more than the copies in it.
    `strides` are those that a file cannot keep. Raises StorageError for a dtype that no file can have.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]):
        given = list(tensors)
        # The widest elements first, then by name: each tensor is aligned in the file, as safetensors would do it.
        named = sorted(given, key=lambda each: (-each[1].itemsize, each[0]))
        ends = [0, *accumulate(tensor.numel() * tensor.itemsize for _, tensor in named)]
        places = {name: ends[at : at + 2] for at, (name, _) in enumerate(named)}
        header = header_bytes(
            {
                name: {"dtype": _name_of(name, tensor), "shape": list(tensor.shape), "data_offsets": places[name]}
                for name, tensor in given
            }
        )
        memory = _page_aligned(len(header) + ends[-1])
        self.data = memory.numpy().data
        """The bytes of the file."""
        self.data[: len(header)] = header
        self.strides: Strides = tuple((name, tensor.stride()) for name, tensor in named if not _is_plain(tensor))
        content = memory[len(header) :]
        self._forms = {name: _form(tensor) for name, tensor in named}
        self._copies = {
            name: content[begin:end].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), begin, end in zip(named, ends, ends[1:], strict=False)
        }

    def takes(self, tensors: Iterable[tuple[str, Tensor]]) -> bool:
        """Returns whether the image can be filled with these tensors: it depends on names, dtypes, shapes, strides."""
        return {name: _form(tensor) for name, tensor in tensors} == self._forms

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors that the image takes, in one call, so that another thread can run Python meanwhile."""
        named = dict(tensors)
        with torch.no_grad():
            if named:
                torch._foreach_copy_([self._copies[name] for name in named], list(named.values()))


def _page_aligned(size: int) -> Tensor:
    memory = torch.empty(size + _PAGE, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % _PAGE
    return memory[begin : begin + size]


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def tensors_of(layer: StoredLayer) -> dict[str, Tensor]:
    """Returns the tensors of a layer by name, each with its strides; raises StorageError for impossible ones."""
    found = {name: _tensor_of(each) for name, each in layer.tensors.items()}
    try:
        return found | {name: laid_out(found[name], stride) for name, stride in layer.strides.items()}
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise StorageError(f"no tensor can have the strides of the layer: {error!r:.300}") from error


def _tensor_of(stored: StoredTensor) -> Tensor:
    memory, dtype = bytearray().join(stored.pieces), getattr(torch, stored.dtype)
    return (torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype, device="cpu")).view(
        stored.shape
    )


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns a copy of a tensor with these strides; raises RuntimeError for impossible ones."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    overwrite(copy, tensor)
    return copy


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor has the strides of a new one, also in dimensions of size 1: some kernels look there."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != expected:
            return False
        expected *= max(size, 1)
    return True


def _name_of(name: str, tensor: Tensor) -> str:
    if sys.byteorder != "little" or tensor.dtype not in _NAMES:
        raise StorageError(f"no checkpoint can have {name}: its dtype is {tensor.dtype}")
    return _NAMES[tensor.dtype]
