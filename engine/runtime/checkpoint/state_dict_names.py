"""The names that a layer's state_dict has beside those of a checkpoint, and the buffers that it leaves out."""

from __future__ import annotations

from torch import nn


def transient_buffers(layer: nn.Module) -> tuple[str, ...]:
    """Returns the names of the buffers that are not persistent: a state_dict leaves them out."""
    stored = layer.state_dict(keep_vars=True)
    return tuple(name for name, _ in layer.named_buffers() if name not in stored)


def aliases(layer: nn.Module) -> tuple[tuple[str, str], ...]:
    """Returns (name in the state_dict, name of the tensor in a checkpoint) of each further name of a tensor."""
    first = {id(tensor): f"weight/{name}" for name, tensor in layer.named_parameters()}
    first |= {id(tensor): f"buffer/0/{name}" for name, tensor in layer.named_buffers()}
    found = ((name, first.get(id(tensor), "")) for name, tensor in layer.state_dict(keep_vars=True).items())
    return tuple((name, kept) for name, kept in found if kept and not kept.endswith(f"/{name}"))
