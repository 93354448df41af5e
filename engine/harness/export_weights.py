"""Writes the weights of the newest good checkpoint that a user names, or of one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.files.checkpoints.checkpoint_folder import checkpoints_at
from engine.files.jobs.checkpoint_choice import find_checkpoint


def export_weights(where: str, results: Path, output: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """Writes the weights of a checkpoint, and returns the facts about it; `say` gets a line about each refused one.

    Raises:
        NothingMatchedError: there is no such run, or it has no checkpoint.
        StorageError: none of its checkpoints is good, or the output cannot be written.
        UserError: the output has no known form.
    """
    from engine.runtime.checkpoint.export import export, refuse_output  # torch

    refuse_output(output)  # before every byte of the checkpoint is read
    found = find_checkpoint(where, results, say)
    done = export(checkpoints_at(found.origin.place), found.manifest, output)
    facts = {"run": found.manifest.run, "step": found.manifest.step, "output": str(output)}
    return facts | {"tensors": done.tensors, "bytes": done.num_bytes}
