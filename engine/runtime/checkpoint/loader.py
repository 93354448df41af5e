"""Fills the replicas of a worker from a checkpoint: the layers of its slots, shadows too, so that no heal follows.

Rules: `CheckpointFolder.layer` reads each layer, and refuses one without the hashes of the trajectory. Weights must
have the strides of the model, because strides can decide bits. A worker with `fsdp` takes its own shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor

from engine.core.checkpoints.manifest import DamagedCheckpointError, Manifest
from engine.core.checkpoints.part_file import parameter_of
from engine.core.checkpoints.resumption import Resumption
from engine.core.errors import Problem, StorageError, UserError
from engine.files.checkpoints.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.runtime.checkpoint.layer_file import tensors_of
from engine.runtime.replica.replicas import Replicas
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.optimizer import LayerOptimizer
from engine.runtime.stage.stage import Stage

_Named = Mapping[str, Tensor]
_NO_WEIGHT = torch.empty(0, 0, device="cpu")


class _MisfitError(DamagedCheckpointError):
    """The tensors are those of another model; the bytes are those that were written."""


def load(replicas: Replicas, origin: Resumption) -> None:
    """Fills every replica with the state of a checkpoint.

    Raises:
        StorageError: a file cannot be read or has other bytes, or its tensors have not the hashes of the trajectory.
        UserError: the job has other bits, and a model that the tensors do not fit.
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
            for pipeline, found in enumerate(buffers):
                copies = (read[index][_buffer(pipeline, name)].clone() for name, _ in layer.named_buffers())
                found.extend(map(stage.device.put, copies))
        for buffer, kept in zip(stage.buffers(), buffers[stage.pipeline], strict=True):
            overwrite(buffer, kept)
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
    of_buffers = [{_buffer(each, name): tensor for name, tensor in layer.named_buffers()} for each in pipelines]
    is_whole = stage.optimizers[index].shard.total == 1  # else they are contiguous
    expected = weights | {name: tensor for each in of_buffers for name, tensor in each.items()}
    for name, tensor in expected.items():
        if name not in read or read[name].shape != tensor.shape or read[name].dtype != tensor.dtype:
            misfit(f"expected {name} with shape {list(tensor.shape)} and {tensor.dtype}, found {_found(read, name)}")
        if is_whole and name in weights and read[name].stride() != tensor.stride():
            misfit(f"expected {name} with strides {tensor.stride()}, found {read[name].stride()}")
    others = read.keys() - expected.keys()
    if unknown := sorted(name for name in others if parameter_of(name) not in stage.optimizers[index].state):
        misfit(f"no such tensor: {unknown[0]}")


def _found(read: _Named, name: str) -> str:
    return f"shape {list(read[name].shape)} and {read[name].dtype}" if name in read else "none"


def _optimizer_state(parameter: str, read: _Named) -> list[tuple[str, Tensor]]:
    beginning = f"optimizer/{parameter}/"
    return [(name.removeprefix(beginning), tensor) for name, tensor in read.items() if parameter_of(name) == parameter]


def _fill(stage: Stage, index: int, read: _Named) -> None:
    """Sets the weights and the optimizer state of one layer."""
    optimizer = stage.optimizers[index]
    with torch.no_grad():
        for name, kept in optimizer.kept.items():
            kept.copy_(optimizer.shard.of(read[f"weight/{name}"]))
        for name in optimizer.state:
            if found := _optimizer_state(name, read):  # else the state stays that of a beginning
                weight = read.get(f"weight/{name}", _NO_WEIGHT)
                optimizer.state[name] = {key: _like(weight, optimizer, key, tensor) for key, tensor in found}


def _like(weight: Tensor, optimizer: LayerOptimizer, key: str, tensor: Tensor) -> Tensor:
    """Returns a copy of a state tensor: the same shard as of its weight, if it has one value for each weight.

    It lies where the weights lie, but for numbers and the count of steps, as torch's `load_state_dict` has it.
    """
    if key != "step" and ":" not in key and (kept := next(iter(optimizer.kept.values()), None)) is not None:
        tensor = tensor.to(kept.device)
    return (optimizer.shard.of(tensor) if tensor.shape == weight.shape else tensor).clone()
