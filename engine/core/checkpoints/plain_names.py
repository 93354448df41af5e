"""The names of weights and buffers in a model's own state_dict, from the names in a checkpoint.

A layer has the name that it has in the user's nn.Sequential, or its number if two layers have one name. The tensors in
a piece of an ordinary module have their whole names already. Optimizer state has no plain name, nor have buffers that
are not persistent, nor those of other pipelines than the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.checkpoints.manifest import Manifest

PIECE = "from "  # begins the name of a layer that is a piece of an ordinary module; no submodule has such a name
_OF_MODEL = ("weight/", "buffer/0/")  # beginnings of names in a part


def prefixes(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the beginning of the plain names of each layer, with a dot; empty for pieces of an ordinary module."""
    if all(name.startswith(PIECE) for name in names):
        return ("",) * len(names)
    return tuple(f"{name}." for name in (names if len(set(names)) == len(names) else range(len(names))))


def plain_names(manifest: Manifest, layer: int, stored: Iterable[str]) -> dict[str, str]:
    """Returns for each plain name of a layer the name of its tensor in the parts, which have the `stored` names."""
    first = manifest.parts_of(layer)[0]
    prefix = prefixes(manifest.names)[layer]
    found = {
        f"{prefix}{name.removeprefix(beginning)}": name
        for name in stored
        for beginning in _OF_MODEL
        if name.startswith(beginning) and name.removeprefix(beginning) not in first.transient
    }
    return found | {f"{prefix}{alias}": name for alias, name in first.aliases}
