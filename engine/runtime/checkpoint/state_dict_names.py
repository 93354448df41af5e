"""The names that a layer's state_dict has beside those of a checkpoint, and the buffers that it leaves out."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn


class StateDictNames(NamedTuple):
    """Differences between the names in a state_dict and those in a part, which has the same two fields."""

    transient: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...]


def state_dict_names(layer: nn.Module) -> StateDictNames:
    """Returns the buffers that are not persistent, and each further name of a tensor with the one in a checkpoint."""
    stored = layer.state_dict(keep_vars=True)
    buffers = list(layer.named_buffers())
    first = {id(tensor): f"weight/{name}" for name, tensor in layer.named_parameters()}
    first |= {id(tensor): f"buffer/0/{name}" for name, tensor in buffers}
    found = ((name, first.get(id(tensor), "")) for name, tensor in stored.items())
    return StateDictNames(
        tuple(name for name, _ in buffers if name not in stored),
        tuple((name, kept) for name, kept in found if kept and not kept.endswith(f"/{name}")),
    )
