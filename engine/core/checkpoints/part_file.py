"""The bytes of the parts of a checkpoint: the tensors of a layer, held against the hashes of the trajectory.

A part has the form of safetensors: the length of a header, the header, the tensors. Its header names the tensors in the
order of the trajectory's hashes, so that who has no model can hash them too: weights, optimizer state, buffers.

Rules: the bytes of a part are hashed, and the same bytes are parsed. A header is the text that bamboo writes, in each
byte, and its tensors fill the part. The tensors of a layer have the hashes of the trajectory, or it is damaged: bytes
that were wrong before they were written have the right SHA-256. Nothing is trusted in between: every size is checked
before it is used.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from engine.core.checkpoints.manifest import DamagedCheckpointError, Manifest, Part

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
_MOST = 1 << 63
_OPTIMIZER = "optimizer/"  # begins the name of a tensor of optimizer state


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


def parameter_of(name: str) -> str:
    """Returns the name of the parameter whose optimizer state a tensor is; empty for another tensor."""
    return name.removeprefix(_OPTIMIZER).rpartition("/")[0] if name.startswith(_OPTIMIZER) else ""


def _check_bytes(part: Part, data: bytes) -> None:
    if len(data) != part.size:
        raise ValueError(f"expected {part.size} bytes, found {len(data)}")
    if (found := hashlib.sha256(data).hexdigest()) != part.sha256:
        raise ValueError(f"expected the SHA-256 {part.sha256[:16]}..., found {found[:16]}...")


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
        raise ValueError("this is no file of a layer: its header is too long")
    try:
        entries = json.loads(data[_LENGTH:begin])
    except (ValueError, RecursionError) as error:
        raise ValueError("this is no file of a layer: its header is no JSON") from error
    if type(entries) is not dict or header_bytes(entries) != data[:begin]:
        raise ValueError("this is no file of a layer: its header is not the text of its values")
    content, found = memoryview(data)[begin:], dict[str, StoredTensor]()
    spans = []
    for name, entry in entries.items():
        dtype, shape, span = _checked(name, entry)
        found[name] = StoredTensor(dtype, shape, (content[slice(*span)],))
        spans.append(span)
    end = 0
    for first, last in sorted(spans):
        if first != end:
            raise ValueError(f"this is no file of a layer: no tensor begins at byte {end}")
        end = last
    if end != len(content):
        raise ValueError(f"this is no file of a layer: its tensors have {end} of {len(content)} bytes")
    return found


def _checked(name: str, entry: Any) -> tuple[str, tuple[int, ...], tuple[int, int]]:
    """Returns dtype, shape and place of a tensor; raises ValueError unless they fit each other."""
    if type(entry) is dict and entry.keys() == _ENTRY and entry["dtype"] in DTYPES:
        dtype, size = DTYPES[entry["dtype"]]
        shape, span = entry["shape"], entry["data_offsets"]
        is_whole = all(type(each) is list and all(map(_is_count, each)) for each in (shape, span))
        if is_whole and len(span) == 2 and len(shape) <= 64 and span[0] + math.prod(shape) * size == span[1]:
            return dtype, tuple(shape), (span[0], span[1])
    raise ValueError(f"this is no file of a layer: expected dtype, shape and place of {name!r:.80}")


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
    for piece in _hashed(named, tensors):
        digest.update(piece)
    return digest.hexdigest()


def _hashed(named: Iterable[tuple[str, str]], tensors: Mapping[str, StoredTensor]) -> Iterator[bytes | memoryview]:
    for name, kept in named:
        dtype, shape, pieces = tensors[kept]
        yield f"{name} torch.{dtype} {list(shape)}\n".encode()
        yield from pieces
