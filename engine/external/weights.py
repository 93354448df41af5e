"""The state of a job that is not bamboo's, as hashes by the name of a tensor: of a process, or in its checkpoints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.runtime.stage.state_hash import hash_tensors

DIGITS = 16  # of a hash: a job of hundreds of tensors writes them at each step


def fingerprint_of(
    model: nn.Module | Mapping[str, Tensor], optimizer: Optimizer | None, sample: int | None
) -> dict[str, str]:
    """Returns the hash of each tensor of a model and its optimizer, in the order of their names in the model.

    `sample` is the number of elements of each that are hashed, None for all.
    """
    named = dict(_of_model(model))
    settings: dict[str, str] = {}
    if optimizer is not None:
        names = {id(tensor): name for name, tensor in named.items()}
        for name, value in _of_optimizer(optimizer, names):
            if isinstance(value, Tensor):
                named[name] = value
            else:
                settings[name] = hashlib.sha256(repr(value).encode()).hexdigest()[:DIGITS]
    whole = {name: _own_part(tensor) for name, tensor in named.items()}
    return (hashes(whole.items()) if sample is None else _sampled(whole, sample)) | settings


def hashes(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Returns the hash of each tensor, of its type, shape and bytes; equal tensors of two names have one hash."""
    return {name: hash_tensors([("", tensor)])[:DIGITS] for name, tensor in named}


def _of_model(model: nn.Module | Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    if isinstance(model, Mapping):
        yield from model.items()
    else:  # a state_dict would gather the shards of FSDP
        yield from model.named_parameters()
        yield from model.named_buffers()


def _of_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> Iterator[tuple[str, Any]]:
    for number, group in enumerate(optimizer.param_groups):
        yield f"optimizer group {number}", {key: value for key, value in group.items() if key != "params"}
        for place, parameter in enumerate(group["params"]):
            name = names.get(id(parameter), f"{number}.{place}")
            for key, value in optimizer.state.get(parameter, {}).items():
                yield f"optimizer {key} of {name}", value


def _own_part(tensor: Tensor) -> Tensor:
    """Returns the part of a tensor that this process has; a DTensor has one."""
    local = getattr(tensor, "to_local", None)
    return tensor.detach() if local is None else local().detach()


def _sampled(named: Mapping[str, Tensor], sample: int) -> dict[str, str]:
    """Returns the hash of each tensor's type, shape and elements at fixed positions, with one copy for each type."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, Tensor, Tensor]]] = {}
    for name, tensor in named.items():
        count, flat = tensor.numel(), tensor if tensor.is_contiguous() else tensor.contiguous()
        distance = max(1, count // sample) | 1  # an odd one does not stay within one column of a matrix
        positions = flat.as_strided((min(sample, -(-count // distance)),), (distance,))
        groups.setdefault((tensor.device, tensor.dtype), []).append((name, tensor, positions))
    digests: dict[str, str] = {}
    for (_, dtype), members in groups.items():
        data = torch.cat([positions for _, _, positions in members]).cpu().view(torch.uint8).numpy().data
        begin = 0
        for name, tensor, positions in members:
            end = begin + positions.numel() * dtype.itemsize
            form = f"{dtype} {list(tensor.shape)}\n".encode()
            digests[name], begin = hashlib.sha256(form + data[begin:end]).hexdigest()[:DIGITS], end
    return {name: digests[name] for name in named}
