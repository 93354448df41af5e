"""Exports the weights of a checkpoint for other programs, and reads weights that a job starts from.

The names are those of the model's own state_dict. Formats: one safetensors file; one file of `torch.save`, which
``torch.load(weights_only=True)`` reads; a folder of safetensors files with the index that transformers and other
readers know; a folder that ``torch.distributed.checkpoint.load`` reads in any number of processes. A file is replaced
atomically; a folder must be new, and gets its name once it is complete.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.manifest import Manifest, average_of, is_manifest, plain_names, prefixes, step_of
from engine.files.atomic_write import storage_errors, write_named
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName, checkpoints_at
from engine.models.layers import Model
from engine.runtime.checkpoint.loader import read_layer
from engine.runtime.stage.buffers import overwrite
from engine.runtime.stage.replicas import Replicas
from engine.runtime.stage.stage import build_layer

INDEX = "model.safetensors.index.json"
_FILES = (".pt", ".pth", ".safetensors")
_METADATA = {"format": "pt"}  # transformers requires it
_LARGEST_BYTES = 5 * 10**9  # of a file in a folder, unless one tensor is larger; the same as in transformers


class ExportedWeights(NamedTuple):
    """The number of tensors written, and their size."""

    tensors: int
    num_bytes: int


def export(
    folder: CheckpointFolder,
    manifest: Manifest,
    output: Path,
    largest: int = _LARGEST_BYTES,
    beside: Callable[[Path], object] = lambda folder: None,
    *,
    for_dcp: bool = False,
    ema: bool = False,
) -> ExportedWeights:
    """Writes the weights of a checkpoint to a ``.safetensors`` file, a ``.pt`` or ``.pth`` file, or a new folder.

    A file in a folder has at most `largest` bytes of tensors, or one tensor; `beside` writes other files into it. With
    `for_dcp`, the folder is one for ``torch.distributed.checkpoint`` instead. With `ema`, averages of trained weights
    are written in their place.

    Raises:
        StorageError: a file cannot be written, or one of the checkpoint is damaged.
        UserError: the output has another format, or is a folder that is not empty.
    """
    refuse_output(output, for_dcp)
    if for_dcp:
        return _write_folder(partial(_write_for_dcp, weights_of(folder, manifest, ema)), output)
    if not output.suffix:

        def write(new: Path) -> ExportedWeights:
            written = _write_files(_tensors(folder, manifest, ema), new, largest)
            beside(new)
            return written

        return _write_folder(write, output)
    tensors = weights_of(folder, manifest, ema)
    if output.suffix == ".safetensors":
        write_named(output, as_safetensors(tensors))
    else:
        buffer = BytesIO()
        torch.save(tensors, buffer)
        write_named(output, buffer.getvalue())
    return ExportedWeights(len(tensors), sum(tensor.nbytes for tensor in tensors.values()))


def refuse_output(output: Path, for_dcp: bool = False) -> None:
    """Raises UserError for an output that is neither a file of a known format nor a new or empty folder."""
    if for_dcp and output.suffix in _FILES:
        raise UserError([Problem("--output", "a new folder", repr(str(output)), "torch's DCP has a file per process")])
    if output.suffix in _FILES or not (output.suffix or output.exists()):
        return
    if output.suffix or not output.is_dir() or any(output.iterdir()):
        hint = "it has files already" if output.is_dir() else ""
        raise UserError([Problem("--output", "FILE.safetensors, FILE.pt or a new folder", repr(str(output)), hint)])


def _tensors(folder: CheckpointFolder, manifest: Manifest, ema: bool = False) -> Iterator[tuple[str, Tensor]]:
    """Yields each tensor by its plain name, layer after layer; a tied one of two layers may have one name."""
    names: set[str] = set()
    for layer in [entry.layer for entry in manifest.layers]:
        stored = read_layer(folder, manifest, layer)
        for plain, name in plain_names(manifest, layer, stored).items():
            if plain not in names:
                names.add(plain)
                yield plain, stored.get(average_of(name), stored[name]) if ema else stored[name]


def weights_of(folder: CheckpointFolder, manifest: Manifest, ema: bool = False) -> dict[str, Tensor]:
    """Returns the weights of a checkpoint as a state_dict of the model; raises StorageError for a damaged file."""
    return dict(_tensors(folder, manifest, ema))


def as_safetensors(tensors: dict[str, Tensor]) -> bytes:
    """Returns the bytes of a safetensors file with these tensors."""
    from safetensors.torch import save

    # Two names of one tensor get a copy each: the format has no shared memory.
    return save({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, metadata=_METADATA)


def _write_folder(write: Callable[[Path], ExportedWeights], output: Path) -> ExportedWeights:
    temporary = output.parent / f".{output.name}.{os.urandom(8).hex()}"
    with storage_errors("write", output):
        temporary.mkdir(mode=0o700)
        try:
            written = write(temporary)
            mask = os.umask(0)
            os.umask(mask)
            temporary.chmod(0o777 & ~mask)
            os.replace(temporary, output)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return written


def _write_for_dcp(tensors: dict[str, Tensor], folder: Path) -> ExportedWeights:
    from torch.distributed.checkpoint import FileSystemWriter, save

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant
        save(dict(tensors), storage_writer=FileSystemWriter(folder), no_dist=True)
    return ExportedWeights(len(tensors), sum(tensor.nbytes for tensor in tensors.values()))


def _write_files(tensors: Iterator[tuple[str, Tensor]], folder: Path, largest: int) -> ExportedWeights:
    files: list[list[str]] = []
    total, held, held_bytes = 0, dict[str, Tensor](), 0

    def write() -> None:
        files.append(list(held))
        write_named(folder / f"{len(files)}.safetensors", as_safetensors(held))

    for name, tensor in tensors:
        if held and held_bytes + tensor.nbytes > largest:
            write()
            held, held_bytes = {}, 0
        held[name] = tensor
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    write()
    places: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        file = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        os.replace(folder / f"{number}.safetensors", folder / file)
        places |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": total}, "weight_map": places}
    write_named(folder / INDEX, json.dumps(index, indent=2, sort_keys=True) + "\n")
    return ExportedWeights(len(places), total)


# The initial weights of a job: a user's file or folder, read by name; each worker reads only its own layers.
#
# Rules: names and shapes must be exactly those of the model's state_dict; every mismatch is reported. No file can run
# code: safetensors, or `torch.load(weights_only=True)`. The files are mapped into memory; those of a checkpoint are
# read as by any other reader of checkpoints.

_MOST_MISMATCHES = 50  # in one message


class GivenWeights:
    """The tensors in the file or folder at `path`, by name; raises UserError if it cannot be read."""

    def __init__(self, path: str):
        self.path = path
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}  # by name of the tensor: an open safetensors file
        self._places: dict[str, str] = {}  # by name of the tensor: the path of that file
        self._tensors: Mapping[str, Tensor] = {}
        try:
            if os.path.isdir(path):
                if manifests := [name for name in os.listdir(path) if is_manifest(name)]:
                    self._tensors = _checkpoint(path, manifests)
                else:
                    for file, names in _files_in(Path(path)).items():
                        self._open(file, names)
            elif path.endswith(".safetensors"):
                self._open(path, None)
            else:
                self._tensors = _torch_file(path)
        except UserError:
            raise
        except Exception as error:  # of the files, or of their index
            reason = str(error or type(error).__name__).splitlines()[0][:300]
            raise _wrong(path, "weights that can be read", reason) from error

    def fill(self, replicas: Replicas) -> None:
        """Sets the weights of every replica, and its persistent buffers in every pipeline; then closes the files."""
        beginnings = _prefixes(replicas.model)
        for stage in replicas.stages.values():
            for index, layer in stage.layers.items():
                for name, tensor in _stored(layer):
                    with torch.no_grad():
                        overwrite(tensor, self.tensor(f"{beginnings[index]}{name}"))
            if stage.boundary:
                stage.boundary = (stage.copy_buffers(),) * len(stage.boundary)
        self._stack.close()

    def names(self) -> list[str]:
        """Returns the names of all tensors."""
        return [*self._files, *self._tensors]

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a tensor, without its bytes."""
        if name in self._files:
            return tuple(self._files[name].get_slice(name).get_shape())
        return tuple(self._tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        """Returns a tensor."""
        tensor: Tensor = self._files[name].get_tensor(name) if name in self._files else self._tensors[name]
        return tensor

    def _open(self, file: str, names: list[str] | None) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
        except SafetensorError as error:
            raise _wrong(self.path, "a safetensors file", f"{file}: {error}") from error
        there = set(opened.keys())
        for name in sorted(there) if names is None else names:
            if name not in there:
                raise _wrong(self.path, "every tensor of the index", f"{name!r} is not in {file!r}")
            if (other := self._places.setdefault(name, file)) != file:
                raise _wrong(self.path, "each tensor in one file", f"{name!r} is in {other!r} and in {file!r}")
            self._files[name] = opened


def check_given(weights: GivenWeights, job: Job, model: Model) -> None:
    """Compares the names and shapes with those of all layers; raises UserError with every mismatch."""
    names, own_names, problems = set(weights.names()), set[str](), list[str]()
    for index, prefix in enumerate(_prefixes(model)):
        first: dict[int, str] = {}  # by tensor: a state_dict lists a tensor under each of its names
        for name, tensor in _stored(build_layer(job, model, index)):
            plain = f"{prefix}{name}"
            own_names.add(plain)
            other = first.setdefault(id(tensor), plain)
            if mismatch := _mismatch(weights, names, plain, tensor) or _other_bits(weights, names, plain, other):
                problems.append(mismatch)
    problems += [f"{name}: not in the model" for name in sorted(names - own_names)]
    for tie in model.ties:
        use, *others = (f"{_prefixes(model)[layer]}{name}" for layer, name in tie.uses)
        problems += filter(None, (_other_bits(weights, names, other, use) for other in others))
    if problems:
        if (more := len(problems) - _MOST_MISMATCHES) > 0:
            problems[_MOST_MISMATCHES:] = [f"{more} more"]
        expected = "a tensor for each name of the model's state_dict, with its shape"
        raise UserError([Problem("init", expected, f"{weights.path!r}: {problem}") for problem in problems])


def _mismatch(weights: GivenWeights, names: set[str], plain: str, tensor: Tensor) -> str:
    """Returns in words how a given tensor differs from that of the model; an empty string if they fit."""
    if plain not in names:
        return f"{plain}: missing"
    if weights.shape(plain) != tuple(tensor.shape):
        return f"{plain}: shape {list(weights.shape(plain))}, the model has {list(tensor.shape)}"
    dtype = weights.tensor(plain).dtype
    return f"{plain}: {dtype}, the model has {tensor.dtype}" if _kind(dtype) != _kind(tensor.dtype) else ""


def _kind(dtype: torch.dtype) -> object:
    """Returns the kind of a dtype: all floating point dtypes are one kind, because weights are converted."""
    return "floating" if dtype.is_floating_point else dtype


def _other_bits(weights: GivenWeights, names: set[str], plain: str, other: str) -> str:
    """Returns in words that two names of one tensor have different bits; an empty string if they have not."""
    if plain == other or not {plain, other} <= names or torch.equal(weights.tensor(plain), weights.tensor(other)):
        return ""
    return f"{plain}: other bits than {other}, and the model has one tensor there"


def _prefixes(model: Model) -> tuple[str, ...]:
    return prefixes([layer.name for layer in model.layers])


def _stored(layer: nn.Module) -> list[tuple[str, Tensor]]:
    return [(name, value) for name, value in layer.state_dict(keep_vars=True).items() if isinstance(value, Tensor)]


def _files_in(folder: Path) -> dict[str, list[str] | None]:
    """Returns the safetensors files of a folder, each with the names that the index lists, or None for all."""
    index = folder / INDEX
    if not index.exists():
        if not (files := sorted(folder.glob("*.safetensors"))):
            raise _wrong(str(folder), "a folder with safetensors files", "it has none")
        return {str(file): None for file in files}
    content = json.loads(index.read_bytes())
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict):
        raise _wrong(str(folder), "an index with a 'weight_map' of file names by tensor", f"none in {index.name}")
    by_file: dict[str, list[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise _wrong(str(folder), "an index that names files of its folder", repr(file))
        by_file.setdefault(str(folder / file), []).append(name)
    return {**by_file}


def _checkpoint(path: str, manifests: list[str]) -> Mapping[str, Tensor]:
    whole = Path(path).absolute()
    if len(manifests) > 1 or (step := step_of(whole.name)) is None:
        raise _wrong(path, "the folder of one checkpoint", ", ".join(manifests)[:300])
    folder = checkpoints_at(whole.parent)
    return weights_of(folder, folder.manifest(CheckpointName(step, manifests[0])))


def _torch_file(path: str) -> Mapping[str, Tensor]:
    if os.path.isfile(path) and not os.path.getsize(path):
        raise _wrong(path, "weights that torch.load(weights_only=True) reads", "an empty file")
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:  # whose text advises to load the file as code
        raise _wrong(
            path, "weights that torch.load(weights_only=True) reads", f"none ({type(error).__name__})"
        ) from error
    if not isinstance(content, Mapping) or not all(isinstance(name, str) for name in content):
        raise _wrong(path, "a state_dict: tensors by name", type(content).__name__)
    for name, tensor in content.items():
        if not isinstance(tensor, Tensor):
            hint = f"{name!r} is a {type(tensor).__name__}; save the state_dict itself"
            raise _wrong(path, "a state_dict: tensors by name", hint)
        if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type != "cpu":
            raise _wrong(path, "dense tensors", f"{name!r} is none: {tensor.layout} on {tensor.device}")
    return content


def _wrong(path: str, expected: str, actual: str) -> UserError:
    return UserError([Problem("init", expected, f"{path!r}: {actual}")])
