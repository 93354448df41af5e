"""Writes the weights of the newest good checkpoint that a user names, or of one step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine.core.errors import NothingMatchedError, StorageError
from engine.harness.checkpoint_place import checkpoint_place


def export_weights(where: str, results: Path, output: Path, say: Callable[[str], object]) -> dict[str, Any]:
    """Writes the weights of a checkpoint, and returns the facts about it; `say` gets a line about each refused one.

    Raises:
        NothingMatchedError: there is no such run, or it has no checkpoint.
        StorageError: none of its checkpoints is good, or the output cannot be written.
        UserError: the output has no known form.
    """
    place = checkpoint_place(where, results)
    good = place.folder.newest_good(place.run, place.step)
    for each in good.refused:
        say(f"a checkpoint is refused: {each.reason}")
    if good.manifest is None:
        of_step = "" if place.step is None else f" of step {place.step}"
        if good.refused:
            raise StorageError(f"no checkpoint{of_step} in {place.folder.place!r} is good")
        raise NothingMatchedError(f"no checkpoint{of_step} in {place.folder.place!r}")
    from engine.runtime.checkpoint.export import export  # torch

    done = export(place.folder, good.manifest, output)
    found = {"run": good.manifest.run, "step": good.manifest.step, "output": str(output)}
    return found | {"tensors": done.tensors, "bytes": done.num_bytes}
