"""A part of a checkpoint: the tensors of one layer, or of one shard of it, as the bytes of a safetensors file.

Rules: a tensor in a file is contiguous. The strides of any other tensor are kept beside the file, because strides can
decide bits. The header is written here, so that the bytes of the tensors are not copied once more. The package
safetensors reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from engine.core.checkpoints.manifest import Strides
from engine.core.errors import StorageError
from engine.runtime.stage.buffers import overwrite

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
}
_ALIGNED = 8  # bytes: the header ends at a multiple, as the format asks for
_PAGE = 4096  # bytes: memory that begins at a multiple goes to the disk without another copy


class LayerImage:
    """The bytes of a file in memory that nothing else changes: a header, and behind it copies of tensors.

    It can be filled again with the same tensors of a later step: fresh memory costs more than the copies in it.
    `strides` are those that a file cannot keep. Raises StorageError for a dtype that no file can have.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]):
        # The widest elements first, then by name: each tensor is aligned in the file, as safetensors would do it.
        named = sorted(tensors, key=lambda each: (-each[1].itemsize, each[0]))
        ends = [0, *accumulate(tensor.numel() * tensor.itemsize for _, tensor in named)]
        entries = {
            name: {"dtype": _name_of(name, tensor), "shape": list(tensor.shape), "data_offsets": ends[at : at + 2]}
            for at, (name, tensor) in enumerate(named)
        }
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _ALIGNED)
        header = len(text).to_bytes(8, "little") + text
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


def from_bytes(data: bytes, strides: Strides) -> dict[str, Tensor]:
    """Returns the tensors of a file by name, each with its strides; raises StorageError for any other bytes."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        found: dict[str, Tensor] = load(data)
        return found | {name: laid_out(found[name], stride) for name, stride in strides}
    except (SafetensorError, AssertionError, KeyError, ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise StorageError(f"this is no file of a layer: {error!r:.300}") from error


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
