"""Which layers of a model hold the same memory, as far as it can be seen before any of them has run.

A buffer may not lie in the memory of a parameter: an optimizer step changes the one, and what is logged for the other
would take that back. A buffer that several layers hold is copied into each of them, as a parameter is; but while the
gradients of a tied parameter are exchanged, nothing keeps such copies equal, so none of the layers may change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.core.errors import Problem, UserError

Uses = tuple[tuple[int, str], ...]  # of one buffer: layer index, name there


def refuse_buffers_in_parameters(layers: Mapping[int, nn.Module]) -> None:
    """Raises UserError that names every buffer which lies in the memory of a parameter of one of the layers."""
    parameters = {
        address: f"parameter {name!r} of layer {index}"
        for index, layer in layers.items()
        for name, parameter in layer.named_parameters()
        for address in _addresses(parameter)
    }
    problems = [
        Problem(
            "model",
            "buffers with memory of their own",
            f"buffer {name!r} of layer {index}, which lies in that of {parameters[address]}",
        )
        for index, layer in layers.items()
        for name, buffer in layer.named_buffers()
        for address in _addresses(buffer)
        if address in parameters
    ]
    if problems:
        raise UserError(problems)


def shared_buffers(layers: Iterable[nn.Module]) -> tuple[Uses, ...]:
    """Returns the buffers of different layers that lie in the same memory."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for index, layer in enumerate(layers):
        for name, buffer in layer.named_buffers():
            for address in _addresses(buffer):
                uses.setdefault(address, []).append((index, name))
    return tuple(tuple(found) for found in uses.values() if len({index for index, _ in found}) > 1)


def _addresses(tensor: Tensor) -> list[int]:
    """Returns where the memory of a tensor begins, unless it has none."""
    if is_lazy(tensor) or not tensor.numel() or tensor.is_meta:
        return []
    return [tensor.untyped_storage().data_ptr()]
