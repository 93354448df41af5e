"""Made-up checkpoints for tests: small parts, hashes that belong to no tensors, and a whole manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from engine.core.checkpoints.manifest import LayerHash, Manifest, Part
from engine.files.checkpoints.checkpoint_folder import CheckpointFolder, CheckpointName


def sha256(text: str) -> str:
    """Returns the SHA-256 (hex) of a text."""
    return hashlib.sha256(text.encode()).hexdigest()


def bytes_of(step: int, layer: int, size: int = 200) -> bytes:
    """Returns the made-up bytes of a layer after a step."""
    return hashlib.shake_256(f"{step} {layer}".encode()).digest(size)


def made_manifest(step: int, parts: Iterable[Part], **changes: Any) -> Manifest:
    """Returns the manifest of made-up layers, one for each layer of the parts."""
    parts = tuple(parts)
    layers = tuple(LayerHash(layer, sha256(f"{step} {layer}"), sha256("")) for layer in {part.layer for part in parts})
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
