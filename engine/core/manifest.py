"""The manifest of a checkpoint: the one file that says which parts belong to it, and which bits they must give.

Rules: the name of a manifest holds the SHA-256 of its bytes, so a torn or changed one has not its own name. Its text is
canonical JSON: another text with the same meaning is refused. The files that it names are single path components of a
fixed form, in the folder of its step. Each layer has all its shards, each once. The header of a part has the order of
the hashes, so commands without a model can compare a layer with the trajectory.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple

from engine.core.errors import StorageError
from engine.core.monitors import Monitors

FORMAT = 2
MOST_BYTES = 16 << 20  # of a manifest: some 60,000 parts
_MOST_VALUES = 1 << 10  # fields and arguments of the job
MOST_OF_POSITION = 8 << 10  # characters of the position in a data set, which a message has to hold
MOST_INNER = 1 << 20  # objects and lists, each of which takes some 200 bytes
_MOST_PIPELINES = 1 << 12
_STEP = re.compile(r"step-([0-9]{8,12})")
_MANIFEST = re.compile(r"manifest-[0-9a-f]{16}\.json")
_PART = re.compile(r"layer-([0-9]{4,8})(?:\.shard-([0-9]{1,6})-of-([0-9]{1,6}))?\.[0-9a-f]{16}\.safetensors")
_HALF = re.compile(r"\.bamboo-[0-9a-f]{16}\.tmp")
_SHA256 = re.compile("[0-9a-f]{64}")
_MOST = 1 << 63  # the systems and torch count with 64 bits
Strides = tuple[tuple[str, tuple[int, ...]], ...]


class DamagedCheckpointError(StorageError):
    """A file of a checkpoint is not the one that was written; the message begins with the name of the file."""


@dataclass(frozen=True, slots=True)
class Part:
    """One file of a checkpoint: a layer, or one shard of it, with the size in bytes and the SHA-256 (hex).

    `strides` are those of the tensors that are not contiguous, by the name of the tensor, in elements. `transient` are
    the buffers that a state_dict leaves out. `aliases` are (name in a state_dict, name of the tensor in the file) where
    a tensor has more than one name. `position` is that of an iterable data set, in the first part.
    """

    layer: int
    shard: int
    shards: int
    file: str
    size: int
    sha256: str
    strides: Strides = ()
    transient: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    position: str = ""


@dataclass(frozen=True, slots=True)
class LayerHash:
    """The hashes (hex) of one layer after the step, as in the trajectory: weights and optimizer state, buffers."""

    layer: int
    state: str
    buffers: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """A whole checkpoint: the state of a job after the commit of `step`, which `parts` hold.

    `names` are those of the layers. `job` is without secret values, `facts` are those of the host. `data_files` and
    `code_files` are the user's: (name, size in bytes, SHA-256).
    `init` is the hash of the weights that the user gave, empty without them; `run` is the name of the run's folder.
    `monitors` are as of the step, with its validation, if the job asks anything of its figures.
    """

    step: int
    epoch: int
    loss: float
    job: Mapping[str, Any]
    facts: Mapping[str, Any]
    layers: tuple[LayerHash, ...]
    parts: tuple[Part, ...]
    data_files: tuple[tuple[str, int, str], ...] = ()
    code_files: tuple[tuple[str, int, str], ...] = ()
    names: tuple[str, ...] = ()
    init: str = ""
    run: str = ""
    monitors: Monitors | None = None
    format: int = FORMAT

    @property
    def folder(self) -> str:
        """The name of the folder with its files."""
        return step_folder(self.step)

    @property
    def num_bytes(self) -> int:
        """The size of its parts together."""
        return sum(part.size for part in self.parts)

    @property
    def pipelines(self) -> int:
        """The number of pipelines of the job, each with buffers of its own."""
        return int(self.job.get("pipelines", 1))

    def parts_of(self, layer: int) -> tuple[Part, ...]:
        """Returns the parts of a layer, in the order of its shards."""
        first = bisect_left(self.parts, layer, key=_LAYER)
        return self.parts[first : bisect_right(self.parts, layer, lo=first, key=_LAYER)]


_LAYER = attrgetter("layer")


def step_folder(step: int) -> str:
    """Returns the name of the folder with the files of the checkpoints of a step."""
    return f"step-{step:08d}"


def step_of(folder: str) -> int | None:
    """Returns the step whose checkpoints stand in the folder of this name; None for any other name."""
    match = _STEP.fullmatch(folder)
    return int(match[1]) if match and step_folder(int(match[1])) == folder else None


def part_file(layer: int, shard: int, shards: int, nonce: str) -> str:
    """Returns the name of a part; the nonce is `nonce_of` its run."""
    of_shard = f".shard-{shard}-of-{shards}" if shards > 1 else ""
    return f"layer-{layer:04d}{of_shard}.{nonce}.safetensors"


def is_part(file: str) -> bool:
    """Returns whether a file in the folder of a step has the name of a part."""
    return _PART.fullmatch(file) is not None


def half_file(nonce: str) -> str:
    """Returns the name of a manifest that is being written."""
    return f".bamboo-{nonce}.tmp"


def owner_of(run: str) -> str:
    """Returns the 8 digits (hex) that stand for a run in the names of its files."""
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def nonce_of(owner: str, rest: bytes) -> str:
    """Returns 16 digits (hex): those of the owner, and of random bytes, so that no two writers choose one name."""
    return (owner + rest.hex())[:16]


def writer_of(file: str) -> str | None:
    """Returns the `owner_of` the run that wrote a part, or half of a manifest; None for any other file."""
    if _PART.fullmatch(file) or _HALF.fullmatch(file):
        return file.rsplit(".", 1)[0][-16:-8]
    return None


def is_manifest(file: str) -> bool:
    """Returns whether a file in the folder of a step has the name of a manifest."""
    return _MANIFEST.fullmatch(file) is not None


def manifest_file(data: bytes) -> str:
    """Returns the name of the manifest with these bytes."""
    return f"manifest-{hashlib.sha256(data).hexdigest()[:16]}.json"


def can_be_parsed(data: bytes, most: int = MOST_BYTES) -> bool:
    """Returns whether a text of JSON can be parsed in bounded memory."""
    return len(data) <= most and data.count(b"{") + data.count(b"[") <= MOST_INNER


def manifest_problems(manifest: Manifest) -> Iterator[str]:
    """Yields for each wrong field its name, and the reason."""
    for name in ("step", "epoch"):
        if not 0 <= (value := getattr(manifest, name)) < _MOST:
            yield f"the field {name!r}: expected at least 0 and less than 2**63, found {str(value)[:80]}"
    if _STEP.fullmatch(manifest.folder) is None:
        yield "the field 'step': it is too large"
    if not manifest.layers or [each.layer for each in manifest.layers] != list(range(len(manifest.layers))):
        yield "the field 'layers': expected each layer once, in order"
    if missing := {"model", "steps"} - manifest.job.keys():
        yield f"the field 'job': expected the fields of a job, found none for {min(missing)!r}"
    if sum(len(each) if isinstance(each, (dict, list)) else 1 for each in manifest.job.values()) > _MOST_VALUES:
        yield f"the field 'job': expected at most {_MOST_VALUES} values"
    pipelines = manifest.job.get("pipelines", 1)
    if type(pipelines) is not int or not 0 < pipelines <= _MOST_PIPELINES:
        yield f"the field 'job': expected 1 to {_MOST_PIPELINES} pipelines, found {str(pipelines)[:80]}"
    if not 0 < len(manifest.run) < 256:
        yield "the field 'run': expected the name of a run"
    if manifest.monitors is not None and not manifest.monitors.is_of(manifest.step):
        yield "the field 'monitors': expected steps up to that of the checkpoint, and a rate"
    if len(manifest.names) != len(manifest.layers):
        yield f"the field 'names': expected one for each of {len(manifest.layers)} layers, found {len(manifest.names)}"
    hashes = [text for each in manifest.layers for text in (each.state, each.buffers)]
    if manifest.init:
        hashes.append(manifest.init)
    hashes += [sha256 for _, _, sha256 in (*manifest.data_files, *manifest.code_files)]
    yield from (f"expected a SHA-256 (hex), found {text!r:.80}" for text in hashes if not _SHA256.fullmatch(text))
    yield from _problems_of_parts(manifest)


def _problems_of_parts(manifest: Manifest) -> Iterator[str]:
    for part in manifest.parts:
        match = _PART.fullmatch(part.file)
        if match is None:
            yield f"the field 'file' of a part: expected the name of a part, found {part.file!r:.200}"
        elif part.file != part_file(part.layer, part.shard, part.shards, part.file.split(".")[-2]):
            yield f"{part.file}: not the name of shard {part.shard} of {part.shards} of layer {part.layer}"
        if not _SHA256.fullmatch(part.sha256) or not 0 <= part.size < _MOST:
            yield f"{part.file}: expected a size in bytes and a SHA-256 (hex)"
        if len(part.position) > MOST_OF_POSITION:
            yield f"{part.file}: expected at most {MOST_OF_POSITION} characters of a position"
        if any(not 0 <= stride < _MOST for _, strides in part.strides for stride in strides):
            yield f"{part.file}: expected strides of at least 0 and less than 2**63"
    groups = [(layer, list(parts)) for layer, parts in groupby(manifest.parts, _LAYER)]
    if [layer for layer, _ in groups] != [each.layer for each in manifest.layers]:
        yield "the field 'parts': expected the parts of each layer, in the order of layers"
    for layer, parts in groups:
        if [(part.shard, part.shards) for part in parts] != [(shard, len(parts)) for shard in range(len(parts))]:
            yield f"the field 'parts': expected each shard of layer {layer} once, in order"


# The bytes of the parts of a checkpoint: the tensors of a layer, held against the hashes of the trajectory.
#
# A part has the form of safetensors: the length of a header, the header, the tensors. Its header names the tensors in
# the order of the trajectory's hashes, so that they can be hashed without the model: weights, optimizer state, buffers.
#
# Rules: the bytes of a part are hashed, and the same bytes are parsed. A header is byte for byte the text that bamboo
# writes, and its tensors fill the part. The tensors of a layer have the hashes of the trajectory, or it is damaged:
# bytes that were wrong before they were written have the right SHA-256. Every size is checked before it is used.


# The name of a dtype in a header -> its name in torch, and the bytes of one element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 1),
}
MOST_HEADER_BYTES = 16 << 20  # some 100,000 tensors
_LENGTH = 8  # bytes, in front of the header
_ALIGNED = 8  # bytes: the header ends at a multiple, as the format asks for
_ENTRY = {"dtype", "shape", "data_offsets"}
_OPTIMIZER = "optimizer/"  # begins the name of a tensor of optimizer state
AVERAGE = "(average)"  # of a weight, beside its optimizer state


class StoredTensor(NamedTuple):
    """A tensor: its dtype as torch names it, its shape, and its bytes, in pieces where shards were joined."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[memoryview, ...]


class StoredLayer(NamedTuple):
    """The tensors of a layer by name, in the order of its hashes, and the strides of those that are not contiguous."""

    tensors: Mapping[str, StoredTensor]
    strides: Mapping[str, tuple[int, ...]]


def header_bytes(entries: Mapping[str, Any]) -> bytes:
    """Returns the beginning of a part with these entries by name: dtype, shape and data_offsets."""
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    return len(text).to_bytes(_LENGTH, "little") + text


def layer_in(manifest: Manifest, layer: int, files: Iterable[tuple[Part, bytes]]) -> StoredLayer:
    """Returns a layer of a checkpoint, whose parts have these bytes, in the order of its shards.

    Raises:
        DamagedCheckpointError: the bytes are not those that were written, or their tensors not those of the trajectory.
    """
    shards, strides, name = [], dict[str, tuple[int, ...]](), ""
    try:
        for part, data in files:
            name = part.file
            _check_bytes(part, data)
            shards.append(_tensors_in(data))
            _check_names(part, shards[-1])
            strides |= dict(part.strides)
        tensors = _put_together(shards)
        expected = manifest.layers[layer]
        if _hashes(tensors, manifest.pipelines) != (expected.state, expected.buffers):
            raise ValueError(f"the tensors of layer {layer} have not the hashes of the trajectory")
    except ValueError as error:
        raise DamagedCheckpointError(f"{manifest.folder}/{name}: {error}") from error
    whole = {name for name, tensor in tensors.items() if len(tensor.pieces) == 1}  # those of shards are contiguous
    return StoredLayer(tensors, {name: each for name, each in strides.items() if name in whole})


def joined_buffers(hashes: list[str]) -> str:
    """Returns one hash for the buffers of all pipelines, in pipeline order; they differ because their data differ."""
    return hashes[0] if len(hashes) == 1 else hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def average_of(name: str) -> str:
    """Returns the name of the average of a weight, which a checkpoint has if its job has `ema`."""
    return f"{_OPTIMIZER}{name.removeprefix('weight/')}/{AVERAGE}"


def parameter_of(name: str) -> str:
    """Returns the name of the parameter whose optimizer state a tensor is; empty for another tensor."""
    return name.removeprefix(_OPTIMIZER).rpartition("/")[0] if name.startswith(_OPTIMIZER) else ""


def _check_bytes(part: Part, data: bytes) -> None:
    if len(data) != part.size:
        raise ValueError(f"expected {part.size} bytes, found {len(data)}")
    if (digest := hashlib.sha256(data).hexdigest()) != part.sha256:
        raise ValueError(f"expected the SHA-256 {part.sha256[:16]}..., found {digest[:16]}...")


def _check_names(part: Part, tensors: Mapping[str, StoredTensor]) -> None:
    for alias, name in part.aliases:
        if name not in tensors:
            raise ValueError(f"{alias!r:.80} is an alias of no tensor")
    for name, strides in part.strides:
        if name not in tensors or len(strides) != len(tensors[name].shape):
            raise ValueError(f"the strides of {name!r:.80} are those of no tensor")


def _tensors_in(data: bytes) -> dict[str, StoredTensor]:
    """Returns the tensors in the bytes of a part; raises ValueError for bytes that bamboo does not write."""
    begin = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
    if begin > min(len(data), _LENGTH + MOST_HEADER_BYTES):
        raise ValueError("this is not the file of a layer: its header is too long")
    try:
        entries = json.loads(data[_LENGTH:begin])
    except (ValueError, RecursionError) as error:
        raise ValueError("this is not the file of a layer: its header is not JSON") from error
    if type(entries) is not dict or header_bytes(entries) != data[:begin]:
        raise ValueError("this is not the file of a layer: its header is not the text of its values")
    content, tensors, spans = memoryview(data)[begin:], dict[str, StoredTensor](), []
    for name, entry in entries.items():
        dtype, shape, span = tensor_entry(name, entry)
        tensors[name] = StoredTensor(dtype, shape, (content[slice(*span)],))
        spans.append(span)
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError(f"this is not the file of a layer: no tensor begins at byte {end}")
        end = last
    if end != len(content):
        raise ValueError(f"this is not the file of a layer: its tensors have {end} of {len(content)} bytes")
    return tensors


def tensor_entry(name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Returns dtype, shape and place of a tensor; raises ValueError unless they fit each other."""
    if type(entry) is dict and entry.keys() == _ENTRY and entry["dtype"] in DTYPES:
        dtype, size = DTYPES[entry["dtype"]]
        shape, span = entry["shape"], entry["data_offsets"]
        is_whole = all(type(each) is list and all(map(_is_count, each)) for each in (shape, span))
        if is_whole and len(span) == 2 and len(shape) <= 64 and span[0] + math.prod(shape) * size == span[1]:
            return dtype, tuple(shape), (span[0], span[1])
    raise ValueError(f"this is not the file of a layer: expected dtype, shape and place of {name!r:.80}")


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _put_together(shards: Sequence[Mapping[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """Returns the tensors of a layer: parts of one tensor are joined; one that each shard has whole is taken once."""
    together: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(name for shard in shards for name in shard):
        first, *others = (shard[name] for shard in shards if name in shard)
        if others and first.shape and not name.startswith("buffer/"):
            if any(each.dtype != first.dtype or each.shape[1:] != first.shape[1:] or not each.shape for each in others):
                raise ValueError(f"the shards of {name!r:.80} do not fit each other")
            rows = first.shape[0] + sum(each.shape[0] for each in others)
            pieces = (piece for each in (first, *others) for piece in each.pieces)
            first = StoredTensor(first.dtype, (rows, *first.shape[1:]), tuple(pieces))
        together[name] = first
    return together


def _hashes(tensors: Mapping[str, StoredTensor], pipelines: int) -> tuple[str, str]:
    """Returns the hashes of weights and optimizer state, and of buffers, as the trajectory has them."""
    state, of_parameters = list[tuple[str, str]](), dict[str, list[str]]()
    numbers = {str(pipeline): pipeline for pipeline in range(pipelines)}
    buffers: list[list[tuple[str, str]]] = [[] for _ in numbers]
    for name in tensors:
        kind, _, rest = name.partition("/")
        pipeline, _, buffer = rest.partition("/")
        if kind == "weight":
            state.append((rest, name))
        elif parameter := parameter_of(name):
            of_parameters.setdefault(parameter, []).append(name)
        elif kind == "buffer" and pipeline in numbers:
            buffers[numbers[pipeline]].append((buffer, name))
        else:  # no hash would tell that it is wrong
            return "", ""
    for parameter, names in of_parameters.items():
        state += ((f"{parameter}.{name.rpartition('/')[2]}", name) for name in sorted(names))
    return _hash(state, tensors), joined_buffers([_hash(each, tensors) for each in buffers])


def _hash(named: Iterable[tuple[str, str]], tensors: Mapping[str, StoredTensor]) -> str:
    """Returns the SHA-256 of tensors under other names, as `hash_tensors` makes it of torch's."""
    digest = hashlib.sha256()
    for name, stored in named:
        dtype, shape, pieces = tensors[stored]
        digest.update(f"{name} torch.{dtype} {list(shape)}\n".encode())
        for piece in pieces:
            digest.update(piece)
    return digest.hexdigest()


# The names of weights and buffers in a model's own state_dict, from the names in a checkpoint.
#
# A layer has the name that it has in the user's nn.Sequential, or its number if two layers have one name. The tensors
# in a piece of an ordinary module have their whole names already. Optimizer state has no plain name, nor have buffers
# that are not persistent, nor those of other pipelines than the first.

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
    names = {
        f"{prefix}{name.removeprefix(beginning)}": name
        for name in stored
        for beginning in _OF_MODEL
        if name.startswith(beginning) and name.removeprefix(beginning) not in first.transient
    }
    return names | {f"{prefix}{alias}": name for alias, name in first.aliases}
