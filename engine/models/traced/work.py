"""About how much an operation computes: the measure by which a module is cut into equal pieces, on every machine."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "matmul", "linear"})


def work_of(function: Any, args: tuple[Any, ...], result: Any) -> int:
    """Returns about the number of floating point operations: exact for products, else one for each number made."""
    made = result[0] if isinstance(result, (tuple, list)) and result else result
    if not isinstance(made, Tensor):
        return 0
    name = function.overloadpacket.__name__
    tensors = [each for each in args if isinstance(each, Tensor)]
    if name in _PRODUCTS:
        left = tensors[1] if name in ("addmm", "baddbmm") else tensors[0]
        return 2 * made.numel() * left.shape[-1]
    if name.startswith("convolution") or name.startswith("mkldnn_convolution"):
        return 2 * made.numel() * math.prod(tensors[1].shape[1:])
    if "attention" in name:
        return 4 * made.numel() * tensors[1].shape[-2]
    return made.numel()
