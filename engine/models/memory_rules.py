"""Layers whose state cannot be kept, and layers that hold the same memory, as far as it shows before any has run.

A buffer may not lie in the memory of a parameter: an optimizer step changes the one, and what is logged for the other
would take that back. A buffer that several layers hold is copied into each of them, as a parameter is; but while the
gradients of a tied parameter are exchanged, nothing keeps such copies equal, so none of the layers may change it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.core.errors import Problem, UserError

Uses = tuple[tuple[int, str], ...]  # of one buffer: layer index, name there


def refuse_what_cannot_be_kept(layers: Mapping[int, nn.Module]) -> None:
    """Raises UserError that names every layer whose state cannot be copied, sent or summed as plain tensors are.

    If there is none, it names every buffer that lies in the memory of a parameter of one of the layers.
    """
    foreign = [
        Problem("model", "layers of plain tensors", f"{what} in layer {index}", hint)
        for index, layer in layers.items()
        for what, hint in _foreign(layer)
    ]
    if problems := foreign or _buffers_in_parameters(layers):
        raise UserError(problems)


def _buffers_in_parameters(layers: Mapping[int, nn.Module]) -> list[Problem]:
    parameters = {
        address: f"parameter {name!r} of layer {index}"
        for index, layer in layers.items()
        for name, parameter in layer.named_parameters()
        for address in _addresses(parameter)
    }
    return [
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


def _foreign(layer: nn.Module) -> Iterator[tuple[str, str]]:
    if any(isinstance(module, torch.jit.ScriptModule) for module in layer.modules()):
        yield "a scripted module", "give the module that it was made of"
        return
    for name, tensor in (*layer.named_parameters(), *layer.named_buffers()):
        if is_lazy(tensor):
            yield f"the lazy parameter or buffer {name!r}", "give its size to the constructor"
        elif tensor.layout is not torch.strided:
            yield f"the sparse tensor {name!r}", "register its indices and values as two buffers"
    for name, module in layer.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield f"sparse gradients of {name or type(module).__name__!r}", "give sparse=False"


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
    if not tensor.numel() or tensor.is_meta:
        return []
    return [tensor.untyped_storage().data_ptr()]
