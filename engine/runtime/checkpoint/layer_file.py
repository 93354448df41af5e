"""A part of a checkpoint: the tensors of one layer, or of one shard of it, as the bytes of a safetensors file.

Rules: a tensor in a file is contiguous. The strides of any other tensor are kept beside the file, because strides can
decide bits. The header is written here, so that the bytes of the tensors are not copied once more. The package
safetensors reads it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
_SMALL = 1 << 14  # bytes: cheaper to copy than to write alone
_ALIGNED = 8  # bytes: the header ends at a multiple, as the format asks for


@dataclass(frozen=True, slots=True)
class LayerFile:
    """The content of a file: its header, the tensors behind it, and the strides that the file cannot keep."""

    header: bytes
    tensors: tuple[Tensor, ...]
    strides: Strides

    @property
    def size(self) -> int:
        """The size of the file, in bytes."""
        return len(self.header) + sum(each.numel() * each.itemsize for each in self.tensors)

    def chunks(self) -> Iterator[bytearray | memoryview]:
        """Yields the bytes of the file in order: small tensors together, because each chunk costs calls."""
        small = bytearray(self.header)
        for tensor in self.tensors:
            if tensor.numel():
                # As bytes, because numpy lacks bfloat16.
                data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
                if len(data) <= _SMALL:
                    small += data
                    continue
                if small:
                    yield small
                    small = bytearray()
                yield data
        if small:
            yield small


def as_file(tensors: Iterable[tuple[str, Tensor]]) -> LayerFile:
    """Returns the content of a file with these named tensors; raises StorageError for a dtype that no file can have."""
    # The widest elements first, then by name: each tensor is aligned in the file, as safetensors itself would do it.
    named = sorted(((name, each.detach()) for name, each in tensors), key=lambda each: (-each[1].itemsize, each[0]))
    ends = [0, *accumulate(tensor.numel() * tensor.itemsize for _, tensor in named)]
    entries = {
        name: {"dtype": _name_of(name, tensor), "shape": list(tensor.shape), "data_offsets": ends[at : at + 2]}
        for at, (name, tensor) in enumerate(named)
    }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    strides = tuple((name, tensor.stride()) for name, tensor in named if not _is_plain(tensor))
    return LayerFile(len(text).to_bytes(8, "little") + text, tuple(tensor for _, tensor in named), strides)


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
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype)
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
