"""Fills the replicas of a worker from a checkpoint, including its shadows, so that no heal follows.

Rules: `CheckpointFolder.layer` reads each layer, and rejects one whose hashes are not those of the trajectory. Weights
must have the strides of the model, because strides can decide bits. A worker with `fsdp` takes only its own shards.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import NoReturn

import torch
from torch import Tensor

from engine.core.checkpoint_rules import Resumption
from engine.core.errors import Problem, StorageError, UserError
from engine.core.manifest import (
    DTYPES,
    DamagedCheckpointError,
    Manifest,
    StoredLayer,
    Strides,
    header_bytes,
    parameter_of,
)
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.optimizer import LayerOptimizer
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import Stage

# A part of a checkpoint: the tensors of one layer, or of one shard of it, as the bytes of a safetensors file.
#
# Rules: tensors in a file are contiguous. Other strides are stored beside the file, because strides can decide bits.
# The header is written here, which saves a copy of the tensors. It lists the tensors in the given order, which is that
# of their hashes. The safetensors package can read it.


_NAMES = {getattr(torch, dtype): name for name, (dtype, _) in DTYPES.items()}
_PAGE = 4096  # bytes: page-aligned memory is written to disk without another copy


class LayerImage:
    """The bytes of a file in memory of their own: a header, and behind it copies of tensors.

    It can be filled again with the same tensors of a later step: fresh memory costs more than the copies.
    `strides` holds those that the file cannot express. Raises StorageError for a dtype that no file can have.
    """

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]):
        pairs = list(tensors)
        # Widest elements first, then by name: so each tensor is aligned in the file, as safetensors does it.
        named = sorted(pairs, key=lambda entry: (-entry[1].itemsize, entry[0]))
        ends = [0, *accumulate(tensor.numel() * tensor.itemsize for _, tensor in named)]
        places = {name: ends[at : at + 2] for at, (name, _) in enumerate(named)}
        header = header_bytes(
            {
                name: {"dtype": _name_of(name, tensor), "shape": list(tensor.shape), "data_offsets": places[name]}
                for name, tensor in pairs
            }
        )
        size = len(header) + ends[-1]
        memory = torch.empty(size + _PAGE, dtype=torch.uint8, device="cpu")
        aligned = -memory.data_ptr() % _PAGE
        memory = memory[aligned : aligned + size]
        self.data = memory.numpy().data
        """The bytes of the file."""
        self.data[: len(header)] = header
        self.strides: Strides = tuple((name, tensor.stride()) for name, tensor in named if not _is_plain(tensor))
        content = memory[len(header) :]
        self._forms = {name: _form(tensor) for name, tensor in named}
        self._copies = {
            name: content[begin:end].view(tensor.dtype).view(tensor.shape)
            for (name, tensor), begin, end in zip(named, ends, ends[1:], strict=False)
        }

    def takes(self, tensors: Iterable[tuple[str, Tensor]]) -> bool:
        """Returns whether the image can be filled with these tensors: with equal names, dtypes, shapes and strides."""
        return {name: _form(tensor) for name, tensor in tensors} == self._forms

    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Copies tensors that the image takes, in one call, so other threads can run Python meanwhile."""
        named = dict(tensors)
        with torch.no_grad():
            if named:
                torch._foreach_copy_([self._copies[name] for name in named], list(named.values()))


def _form(tensor: Tensor) -> tuple[torch.dtype, torch.Size, tuple[int, ...]]:
    return tensor.dtype, tensor.shape, tensor.stride()


def tensors_of(layer: StoredLayer) -> dict[str, Tensor]:
    """Returns the tensors of a layer by name, with their strides; raises StorageError for impossible ones."""
    tensors = {}
    for name, stored in layer.tensors.items():
        memory, dtype = bytearray().join(stored.pieces), getattr(torch, stored.dtype)
        flat = torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype, device="cpu")
        tensors[name] = flat.view(stored.shape)
    try:
        return tensors | {name: laid_out(tensors[name], stride) for name, stride in layer.strides.items()}
    except (ValueError, TypeError, RuntimeError, OverflowError) as error:
        raise StorageError(f"no tensor can have the strides of the layer: {error!r:.300}") from error


def laid_out(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """Returns a copy of a tensor with these strides; raises RuntimeError for impossible ones."""
    copy = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    overwrite(copy, tensor)
    return copy


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether a tensor has default strides, also in dimensions of size 1: some kernels look there."""
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


_Named = Mapping[str, Tensor]
_NO_WEIGHT = torch.empty(0, 0, device="cpu")


class _MisfitError(DamagedCheckpointError):
    """The tensors are intact, but of another model."""


def position_of(origin: Resumption) -> str:
    """Returns the position of an iterable data set in a checkpoint; empty without one. Raises StorageError."""
    manifest = checkpoints_at(origin.place).manifest(CheckpointName(origin.step, origin.file))
    return next((part.position for part in manifest.parts if part.position), "")


def load(replicas: Replicas, origin: Resumption) -> None:
    """Fills every replica with the state of a checkpoint.

    Raises:
        StorageError: a file cannot be read or is damaged, or its tensors do not have the hashes of the trajectory.
        UserError: the job allows other bits, and has a model that the tensors do not fit.
    """
    folder = checkpoints_at(origin.place)
    manifest = folder.manifest(CheckpointName(origin.step, origin.file))
    try:
        _load(replicas, folder, manifest)
    except _MisfitError as error:
        if not origin.other_bits:
            raise
        hint = f"{error}; other code, or data of other sizes, makes another model"
        raise UserError(
            [Problem("--other-bits", "a model that the tensors of the checkpoint fit", "", hint)]
        ) from error


def _load(replicas: Replicas, folder: CheckpointFolder, manifest: Manifest) -> None:
    if (num_layers := len(replicas.model.layers)) != len(manifest.layers):
        raise _MisfitError(f"{manifest.folder}: expected {num_layers} layers, found {len(manifest.layers)}")
    read: dict[int, _Named] = {}
    for slot in sorted(replicas.stages):
        stage = replicas.stages[slot]
        buffers: list[list[Tensor]] = [[] for _ in range(replicas.job.pipelines)]
        for index, layer in stage.layers.items():
            if index not in read:
                read[index] = read_layer(folder, manifest, index)
                _refuse_misfits(stage, index, read[index], manifest)
            _fill(stage, index, read[index])
            for pipeline, of_pipeline in enumerate(buffers):
                copies = (read[index][_buffer(pipeline, name)].clone() for name, _ in layer.named_buffers())
                of_pipeline.extend(map(stage.device.put, copies))
        for buffer, tensor in zip(stage.buffers(), buffers[stage.pipeline], strict=True):
            overwrite(buffer, tensor)
        stage.boundary = tuple(map(tuple, buffers)) if replicas.job.retains else ()


def read_layer(folder: CheckpointFolder, manifest: Manifest, layer: int) -> _Named:
    """Returns the tensors of one layer by their names in its files; raises StorageError for a damaged file."""
    stored = folder.layer(manifest, layer)
    try:
        return tensors_of(stored)
    except StorageError as error:
        raise DamagedCheckpointError(f"{manifest.folder}/{manifest.parts_of(layer)[0].file}: {error}") from error


def _buffer(pipeline: int, name: str) -> str:
    return f"buffer/{pipeline}/{name}"


def _refuse_misfits(stage: Stage, index: int, read: _Named, manifest: Manifest) -> None:
    """Raises DamagedCheckpointError unless the tensors are those that this layer has."""
    layer, pipelines = stage.layers[index], range(stage.job.pipelines)

    def misfit(why: str) -> NoReturn:
        raise _MisfitError(f"{manifest.folder}: {stage.where(index)}: {why}")

    weights = {f"weight/{name}": parameter for name, parameter in layer.named_parameters()}
    buffers = {_buffer(number, name): tensor for number in pipelines for name, tensor in layer.named_buffers()}
    is_whole = stage.optimizers[index].shard.total == 1  # else they are contiguous
    expected = weights | buffers
    for name, tensor in expected.items():
        if name not in read or read[name].shape != tensor.shape or read[name].dtype != tensor.dtype:
            actual = f"shape {list(read[name].shape)} and {read[name].dtype}" if name in read else "none"
            misfit(f"expected {name} with shape {list(tensor.shape)} and {tensor.dtype}, found {actual}")
        if is_whole and name in weights and read[name].stride() != tensor.stride():
            misfit(f"expected {name} with strides {tensor.stride()}, found {read[name].stride()}")
    others = read.keys() - expected.keys()
    if unknown := sorted(name for name in others if parameter_of(name) not in stage.optimizers[index].state):
        misfit(f"no such tensor: {unknown[0]}")


def _fill(stage: Stage, index: int, read: _Named) -> None:
    optimizer = stage.optimizers[index]
    with torch.no_grad():
        for name, own in optimizer.kept.items():
            own.copy_(optimizer.shard.of(read[f"weight/{name}"]))
        for name in optimizer.state:
            prefix = f"optimizer/{name}/"
            state = {key.removeprefix(prefix): value for key, value in read.items() if parameter_of(key) == name}
            if state:  # else it stays initial
                weight = read.get(f"weight/{name}", _NO_WEIGHT)
                optimizer.state[name] = {key: _like(weight, optimizer, key, value) for key, value in state.items()}


def _like(weight: Tensor, optimizer: LayerOptimizer, key: str, tensor: Tensor) -> Tensor:
    """Returns a copy of a state tensor, sharded as its weight and on its device, but for numbers and step counts."""
    if key != "step" and ":" not in key and (own := next(iter(optimizer.kept.values()), None)) is not None:
        tensor = tensor.to(own.device)
    return (optimizer.shard.of(tensor) if tensor.shape == weight.shape else tensor).clone()
