"""The state of a job that is not bamboo's, as hashes by the name of a tensor: in a process, or in its checkpoints.

Rule: no checkpoint runs code: one that would have to is not read, and the caller says so. Of a checkpoint, the tensors
count, and no other value.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from engine.core.checks.external_verdict import StateReport
from engine.core.errors import StorageError
from engine.external.pickled import PickledObject, unpickled
from engine.runtime.stage.state_hash import hash_tensors

DIGITS = 16  # of a hash: a job of hundreds of tensors writes them at each step


def fingerprint_of(
    model: nn.Module | Mapping[str, Tensor], optimizer: Optimizer | None, sample: int | None
) -> dict[str, str]:
    """Returns the hash of each tensor of a model and its optimizer, of `sample` elements; None for all."""
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
    if sample is None:
        return {name: _quick_hash(tensor) for name, tensor in whole.items()} | settings
    return _sampled(whole, sample) | settings


@cache
def _hasher() -> Callable[[bytes], Any]:
    """Returns XXH3, which hashes as fast as memory is read, where it is installed: a run and its twin have it both."""
    try:
        from xxhash import xxh3_64
    except ImportError:
        return hashlib.sha256
    return xxh3_64


def _quick_hash(tensor: Tensor) -> str:
    """Returns a hash of a tensor's type, shape and bytes, read in place before the next step changes them."""
    plain = tensor.cpu().contiguous()
    digest = _hasher()(f"{plain.dtype} {list(plain.shape)}\n".encode())
    digest.update(plain.reshape(-1).view(torch.uint8).numpy().data)
    return str(digest.hexdigest())[:DIGITS]


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


# Checkpoints: files of torch.save and of safetensors, and folders of torch.distributed.checkpoint.

_FILES = (".pt", ".pth", ".ckpt", ".bin", ".safetensors")
_METADATA = ".metadata"
_STEP = re.compile(r"(?:step|iter|iteration|ckpt|checkpoint)[-_=]?(\d+)|^(\d+)(?:\.|$)")
_STEP_KEYS = ("step", "global_step", "iteration")


class CheckpointEvidence(NamedTuple):
    """The states in a run's and its twin's checkpoints, their tensors' distances, and what could not be read."""

    run: list[StateReport]
    twin: list[StateReport]
    distances: dict[tuple[int, str], float]
    unread: list[str]


def checkpoint_evidence(run: Path, twin: Path) -> CheckpointEvidence:
    """Returns what the checkpoints below two folders show; the step of one is in its path, or in the file."""
    unread: list[str] = []
    ours, theirs = (dict(_states(folder, unread)) for folder in (run, twin))
    states: tuple[list[StateReport], list[StateReport]] = ([], [])
    distances: dict[tuple[int, str], float] = {}
    for step in sorted(ours.keys() | theirs.keys()):
        tensors = [_tensors_of(paths.get(step, ()), unread) for paths in (ours, theirs)]
        for reports, paths, of in zip(states, (ours, theirs), tensors, strict=True):
            if of:
                reports.append(StateReport(step, _written_ns(paths[step]), None, hashes(of.items())))
        for name in tensors[0].keys() & tensors[1].keys():
            distances[step, name] = distance(tensors[0][name], tensors[1][name])
    return CheckpointEvidence(*states, distances, unread)


def distance(one: Tensor, other: Tensor) -> float:
    """Returns the largest difference of two tensors relative to their largest element; inf if it is not defined."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return math.inf
    if one.equal(other) or not one.numel():
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    first, second = one.to(wide), other.to(wide)
    relative = float((first - second).abs().max() / torch.maximum(first.abs().max(), second.abs().max()))
    return relative if math.isfinite(relative) else math.inf


def _states(folder: Path, unread: list[str]) -> Iterator[tuple[int, list[Path]]]:
    """Yields the steps of the checkpoints below a folder, each with its files and folders."""
    by_step: dict[int, list[Path]] = {}
    whole = [path.parent for path in folder.rglob(_METADATA)]
    paths = [path for path in folder.rglob("*") if path.suffix in _FILES and not _is_in(path, whole)]
    for path in sorted([*whole, *paths]):
        step = _step_of(path, folder, unread)
        if step is not None:
            by_step.setdefault(step, []).append(path)
    yield from by_step.items()


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(folder in path.parents for folder in folders)


def _step_of(path: Path, folder: Path, unread: list[str]) -> int | None:
    for part in reversed(path.relative_to(folder).parts):
        if match := _STEP.search(part):
            return int(match[1] or match[2])
    content = _content(path, unread)
    step = next((value for key in _STEP_KEYS if type(value := content.get(key)) is int), None)
    if step is None and content:
        unread.append(f"{path}: no number of a step in its path, nor as {', '.join(_STEP_KEYS)} in it")
    return step


def _written_ns(paths: Iterable[Path]) -> int:
    """Returns when the last of some files was written, on the clock of CLOCK_MONOTONIC."""
    files = [path / _METADATA if path.is_dir() else path for path in paths]
    return max(file.stat().st_mtime_ns for file in files) + time.monotonic_ns() - time.time_ns()


def _tensors_of(paths: Iterable[Path], unread: list[str]) -> dict[str, Tensor]:
    contents = {path.name: dict(_flat(_content(path, unread))) for path in paths}
    if len(contents) == 1:
        return next(iter(contents.values()))
    return {f"{file}: {name}": tensor for file, of in contents.items() for name, tensor in of.items()}


def _flat(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _flat(inner, f"{name}.{key}" if name else str(key))


def _content(path: Path, unread: list[str]) -> Mapping[str, Any]:
    """Returns what a checkpoint has by name; nothing if it cannot be read, which goes into `unread`."""
    try:
        if path.is_dir():
            return dict(_distributed(path))
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except StorageError as error:
        unread.append(str(error))
        return {}
    except Exception as error:  # whose text advises to load the file as code
        unread.append(f"{path}: no tensors that can be read without running code ({type(error).__name__})")
        return {}
    return content if isinstance(content, Mapping) else {"": content}


def _distributed(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yields the whole tensors of a checkpoint of torch.distributed.checkpoint, whatever processes wrote it."""
    place = folder / _METADATA
    fields = _state(unpickled(place.read_bytes(), str(place)), "Metadata")
    pieces: dict[str, list[tuple[tuple[int, ...], Mapping[str, Any]]]] = {}
    for index, info in fields["storage_data"].items():
        of = _state(index, "MetadataIndex")
        pieces.setdefault(of["fqn"], []).append((_size(of.get("offset")), _state(info, "_StorageInfo")))
    for name, entry in fields["state_dict_metadata"].items():
        if entry.name.endswith(".TensorStorageMetadata"):
            yield name, _joined(folder, name, _size(entry.state["size"]), pieces.get(name, []))


def _joined(
    folder: Path, name: str, size: tuple[int, ...], pieces: Iterable[tuple[tuple[int, ...], Mapping[str, Any]]]
) -> Tensor:
    whole, missing = None, math.prod(size)
    for offset, info in pieces:
        file, begin, length = info["relative_path"], info["offset"], info["length"]
        if Path(file).name != file or info.get("transform_descriptors"):
            raise StorageError(f"{folder}: tensor {name!r} is compressed, or not in a file of this folder")
        with (folder / file).open("rb") as opened:
            opened.seek(begin)
            part = torch.load(BytesIO(opened.read(length)), map_location="cpu", weights_only=True)
        whole = torch.empty(size, dtype=part.dtype) if whole is None else whole
        begins = offset or (0,) * part.dim()
        whole[tuple(slice(at, at + count) for at, count in zip(begins, part.shape, strict=True))] = part
        missing -= part.numel()
    if whole is None or missing:
        raise StorageError(f"{folder}: tensor {name!r} is not complete")
    return whole


def _state(value: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(value, PickledObject) or not value.name.endswith(f".{kind}") or not isinstance(value.state, dict):
        raise StorageError(f"the metadata has no {kind} where one is expected")
    return value.state


def _size(value: Any) -> tuple[int, ...]:
    return tuple(value.args[0]) if isinstance(value, PickledObject) else ()
