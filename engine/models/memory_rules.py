"""Rules for the memory of layers, checked before the first forward: state that cannot be replicated, shared memory.

A buffer may not share memory with a parameter: setting the buffer from the log would undo the optimizer step of the
parameter. A buffer of several layers becomes a copy in each of them, like a tied parameter. But no exchange keeps these
copies equal, so no forward may change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from engine.core.errors import Problem, UserError

Uses = tuple[tuple[int, str], ...]  # the uses of one buffer: (layer index, buffer name)


def refuse_what_cannot_be_kept(layers: Mapping[int, nn.Module]) -> None:
    """Raises UserError for layers whose state is not in plain tensors, or buffers that share a parameter's memory."""
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
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            yield f"the extra state of {name or type(module).__name__!r}", "register it as a buffer"
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            yield f"sparse gradients of {name or type(module).__name__!r}", "give sparse=False"


def shared_buffers(layers: Mapping[int, nn.Module]) -> tuple[Uses, ...]:
    """Returns the uses of each buffer whose memory several layers share."""
    uses: dict[int, list[tuple[int, str]]] = {}
    for index, layer in layers.items():
        for name, buffer in layer.named_buffers():
            for address in _addresses(buffer):
                uses.setdefault(address, []).append((index, name))
    return tuple(tuple(places) for places in uses.values() if len({index for index, _ in places}) > 1)


def _addresses(tensor: Tensor) -> list[int]:
    if not tensor.numel() or tensor.is_meta:
        return []
    return [tensor.untyped_storage().data_ptr()]
