"""Exports the weights of a checkpoint, for programs that do not know bamboo.

The names are those of the model's own state_dict. Forms: one safetensors file; one file of `torch.save`, which
``torch.load(weights_only=True)`` reads; a folder of safetensors files with the index that transformers and other
readers know. A file is replaced in one step; a folder must be new, and gets its name when it is whole.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from engine.core.checkpoints.manifest import Manifest
from engine.core.checkpoints.plain_names import plain_names
from engine.core.errors import Problem, UserError
from engine.files.atomic_write import storage_errors, write_named
from engine.files.checkpoints.checkpoint_folder import CheckpointFolder
from engine.runtime.checkpoint.loader import read_layer

INDEX = "model.safetensors.index.json"
_FILES = (".pt", ".pth", ".safetensors")
_METADATA = {"format": "pt"}  # transformers asks for it
_LARGEST_BYTES = 5 * 10**9  # of a file in a folder, unless one tensor is larger; as transformers has it


class Exported(NamedTuple):
    """The number of tensors that were written, and their bytes."""

    tensors: int
    num_bytes: int


def export(folder: CheckpointFolder, manifest: Manifest, output: Path, largest: int = _LARGEST_BYTES) -> Exported:
    """Writes the weights of a checkpoint to a ``.safetensors`` file, a ``.pt`` or ``.pth`` file, or a new folder.

    A file of a folder has at most `largest` bytes of tensors, or one tensor.

    Raises:
        StorageError: a file cannot be written, or one of the checkpoint is not what was written.
        UserError: the output has another form, or is a folder that has files.
    """
    refuse_output(output)
    if output.suffix:
        tensors = weights_of(folder, manifest)
        write_named(output, _pickled(tensors) if output.suffix != ".safetensors" else as_safetensors(tensors))
        return Exported(len(tensors), sum(map(_size, tensors.values())))
    return _write_folder(_tensors(folder, manifest), output, largest)


def refuse_output(output: Path) -> None:
    """Raises UserError for an output that is no file of a known form, and no new or empty folder."""
    if output.suffix in _FILES or not (output.suffix or output.exists()):
        return
    if output.suffix or not output.is_dir() or any(output.iterdir()):
        hint = "it has files already" if output.is_dir() else ""
        raise UserError([Problem("--output", "FILE.safetensors, FILE.pt or a new folder", repr(str(output)), hint)])


def _tensors(folder: CheckpointFolder, manifest: Manifest) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor by its plain name, layer after layer; two layers may have a tied one under one name."""
    seen: set[str] = set()
    for each in manifest.layers:
        stored = read_layer(folder, manifest, each.layer)
        for plain, name in plain_names(manifest, each.layer, stored).items():
            if plain not in seen:
                seen.add(plain)
                yield plain, stored[name]


def _pickled(tensors: dict[str, Tensor]) -> bytes:
    buffer = BytesIO()
    torch.save(tensors, buffer)
    return buffer.getvalue()


def weights_of(folder: CheckpointFolder, manifest: Manifest) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint as a state_dict of the model; raises StorageError for a damaged file."""
    return dict(_tensors(folder, manifest))


def as_safetensors(tensors: dict[str, Tensor]) -> bytes:
    """Returns the bytes of a safetensors file with these tensors."""
    from safetensors.torch import save

    # Two names of one tensor get a copy each: the format has no shared memory.
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, metadata=_METADATA)


def _write_folder(tensors: Iterator[tuple[str, Tensor]], output: Path, largest: int) -> Exported:
    temporary = output.parent / f".{output.name}.{os.urandom(8).hex()}"
    with storage_errors("write", output):
        temporary.mkdir(mode=0o700)
        try:
            found = _write_files(tensors, temporary, largest)
            temporary.chmod(0o777 & ~_umask())
            os.replace(temporary, output)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return found


def _write_files(tensors: Iterator[tuple[str, Tensor]], folder: Path, largest: int) -> Exported:
    files: list[list[str]] = []
    total, held, held_bytes = 0, dict[str, Tensor](), 0

    def write() -> None:
        files.append(list(held))
        write_named(folder / f"{len(files)}.safetensors", as_safetensors(held))

    for name, tensor in tensors:
        if held and held_bytes + _size(tensor) > largest:
            write()
            held, held_bytes = {}, 0
        held[name] = tensor
        held_bytes += _size(tensor)
        total += _size(tensor)
    write()
    places: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        os.replace(folder / f"{number}.safetensors", folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_named(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return Exported(len(places), total)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.itemsize


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
