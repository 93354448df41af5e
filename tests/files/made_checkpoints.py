"""Made-up checkpoints for tests: small parts, hashes that belong to no tensors, and a whole manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from engine.core.manifest import LayerHash, Manifest, Part, header_bytes
from engine.files.checkpoint_folder import CheckpointFolder, CheckpointName


def sha256(text: str) -> str:
    """Returns the SHA-256 (hex) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def weights_of(step: int, layer: int, size: int = 100) -> bytes:
    """Returns the made-up weights of a layer after a step."""
    return hashlib.shake_256(f"{step} {layer}".encode()).digest(size)


def bytes_of(step: int, layer: int) -> bytes:
    """Returns the bytes of the part with these weights."""
    return part_of(w=weights_of(step, layer))


def part_of(**tensors: bytes) -> bytes:
    """Returns the bytes of a part with tensors of these bytes, of weights if no other kind is named."""
    entries, end = {}, 0
    for name, data in tensors.items():
        entries[name if "/" in name else f"weight/{name}"] = {
            "dtype": "U8",
            "shape": [len(data)],
            "data_offsets": [end, end + len(data)],
        }
        end += len(data)
    return header_bytes(entries) + b"".join(tensors.values())


def state_hash(**tensors: bytes) -> str:
    """Returns the hash of a layer with weights of these bytes, as the trajectory has it."""
    heads = ((f"{name} torch.uint8 {[len(data)]}\n".encode(), data) for name, data in tensors.items())
    return hashlib.sha256(b"".join(piece for each in heads for piece in each)).hexdigest()


def made_manifest(step: int, parts: Iterable[Part], **changes: Any) -> Manifest:
    """Returns the manifest of made-up layers, one for each layer of the parts."""
    parts = tuple(parts)
    hashes = {part.layer: state_hash(w=weights_of(step, part.layer)) for part in parts}
    layers = tuple(LayerHash(layer, state, sha256("")) for layer, state in hashes.items())
    values: dict[str, Any] = {
        "run": "20261123-120000-gpt-0a1b",
        "step": step,
        "epoch": 0,
        "loss": 1.0 / (step + 1),
        "job": {"model": "gpt", "steps": 80, "lr": 0.002, "model_args": {"tied": True}},
        "facts": {"python": "3.11", "torch": "2.10", "isa": "avx2"},
        "data_files": (("text.txt", 11, sha256("text")),),
        "layers": layers,
        "names": tuple(str(each.layer) for each in layers),
        "parts": parts,
    }
    return Manifest(**values | changes)


def save(folder: CheckpointFolder, step: int, num_layers: int = 2, **changes: Any) -> CheckpointName:
    """Writes a whole checkpoint in the order of the product: parts first, manifest last."""
    parts = [folder.write_part(step, layer, [bytes_of(step, layer)]) for layer in range(num_layers)]
    return folder.publish(made_manifest(step, parts, **changes))
