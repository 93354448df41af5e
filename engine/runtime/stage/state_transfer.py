"""Heal: the owner of a slot sends its state at the step boundary to a new shadow.

A header lists the tensors and the SHA-256 of each. The new shadow waits for all tensors, fills its replica and compares
the hashes. The owner sends without a copy: weights and optimizer state change only after the new shadow has voted for
the commit, and every replica keeps copies of the buffers of the boundary. The new shadow copies each tensor to its
place as it arrives, so it needs extra memory for one tensor and one chunk only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from engine.core.errors import InvariantError
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.stage import Stage
from engine.runtime.stage.state_hash import hash_tensors
from engine.runtime.transport.transfers import arriving, send_bulk
from engine.runtime.transport.transport import AsideKey, Channel, TensorSpec

StatePlace = tuple[str, int, str, str]  # (kind, layer or pipeline, parameter or number, name of the state tensor)


def state_of(stage: Stage) -> Iterator[tuple[StatePlace, Tensor]]:
    """Yields the weights, the optimizer state and the buffers of every pipeline at the step boundary."""
    for index, optimizer in stage.optimizers.items():
        for name, weight in optimizer.kept.items():
            yield ("weight", index, name, ""), weight.detach()
        for name, named in optimizer.state.items():
            for key, tensor in named.items():
                yield ("optimizer", index, name, key), tensor
    for pipeline, buffers in enumerate(stage.boundary):
        for number, buffer in enumerate(buffers):
            yield ("buffer", pipeline, str(number), ""), buffer


def send_state(channel: Channel[AsideKey], targets: Iterable[int], key: AsideKey, stage: Stage) -> None:
    """Starts sending the state of a slot at the step boundary; the open step may have begun."""
    state = list(state_of(stage))
    with stage.device.waiting():
        hashes = [_hash_of(tensor) for _, tensor in state]
    header = json.dumps(
        [
            [place, TensorSpec.of(tensor).to_json(), tensor.stride(), _on_host(tensor), digest]
            for (place, tensor), digest in zip(state, hashes, strict=True)
        ]
    ).encode()
    as_bytes = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for target in targets:
        channel.send(target, key, (torch.tensor([len(header)], device="cpu"),))
        channel.send(target, key, (as_bytes,))
        send_bulk(channel, (target,), key, [stage.device.put(tensor) for _, tensor in state])


def take_state(channel: Channel[AsideKey], source: int, key: AsideKey, stage: Stage) -> int:
    """Fills a new replica with a slot's state; returns the ns since its first message, or raises InvariantError."""
    size = _take(channel, source, key, TensorSpec((1,), torch.int64, False))
    begun_ns = time.monotonic_ns()
    with stage.device.waiting():
        (length,) = size.tolist()
    header = _take(channel, source, key, TensorSpec((length,), torch.uint8, False))
    with stage.device.waiting():
        entries = json.loads(header.cpu().numpy().tobytes())
    specs = [TensorSpec.from_json(spec) for _, spec, *_ in entries]
    for optimizer in stage.optimizers.values():
        optimizer.state = {name: {} for name in optimizer.state}
    for what, layer, name, state in (place for place, *_ in entries):
        if what == "optimizer":  # large tensors arrive first, but the owner's order counts
            stage.optimizers[layer].state[name][state] = torch.empty(0, device="cpu")
    boundary: list[dict[int, Tensor]] = [{} for _ in stage.boundary]
    for index, tensor in arriving(channel, source, key, specs):
        place, _, stride, is_on_host, _ = entries[index]
        with stage.device.waiting():
            _fill(stage, tuple(place), _laid_out(tensor, stride, is_on_host), boundary)
        del tensor  # before the next one comes
    stage.boundary = tuple(tuple(buffers[number] for number in sorted(buffers)) for buffers in boundary)
    with stage.device.waiting():
        _compare(stage, {tuple(place): digest for place, *_, digest in entries})
    return time.monotonic_ns() - begun_ns


def _take(channel: Channel[AsideKey], source: int, key: AsideKey, spec: TensorSpec) -> Tensor:
    channel.post(source, key, (spec,))
    (tensor,) = channel.take(source, key)
    return tensor


def _laid_out(tensor: Tensor, stride: Sequence[int], is_on_host: bool) -> Tensor:
    """Returns a tensor with the strides and the device that it has at the owner."""
    if tensor.stride() == tuple(stride) and not (is_on_host and tensor.device.type != "cpu"):
        return tensor
    to = "cpu" if is_on_host else tensor.device
    laid_out = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=to)
    overwrite(laid_out, tensor)
    return laid_out


def _fill(stage: Stage, place: StatePlace, tensor: Tensor, boundary: list[dict[int, Tensor]]) -> None:
    what, index, name, key = place
    with torch.no_grad():
        if what == "weight":
            stage.optimizers[index].kept[name].copy_(tensor)
        elif what == "optimizer":
            stage.optimizers[index].state[name][key] = tensor
        else:
            boundary[index][int(name)] = tensor
            if index == stage.pipeline:
                overwrite(stage.buffers()[int(name)], tensor)


def _compare(stage: Stage, digests: Mapping[StatePlace, str]) -> None:
    own = {place: _hash_of(tensor) for place, tensor in state_of(stage)}
    for place in sorted({*digests, *own}):
        if digests.get(place) != own.get(place):
            what, index, *names = place
            where = f"pipeline {index}, buffer" if what == "buffer" else f"{stage.where(index)}, {what}"
            raise InvariantError(
                f"the new replica of layers {min(stage.layers)} to {max(stage.layers)} of pipeline {stage.pipeline} "
                f"is not what its owner sent: {where} {' '.join(names).strip()}"
            )


def _on_host(tensor: Tensor) -> bool:
    """Returns whether a tensor is on the host, as an optimizer's count of steps may be; replicas keep it there."""
    return tensor.device.type == "cpu"


def _hash_of(tensor: Tensor) -> str:
    return hash_tensors([("", tensor)])
