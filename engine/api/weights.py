"""Weights from and to the modules of a program."""

from __future__ import annotations

import hashlib
from pathlib import Path

from torch import Tensor, nn

from engine.core.errors import StorageError
from engine.files.atomic_write import write_named
from engine.files.checkpoint_folder import checkpoints_at
from engine.files.jobs.checkpoint_choice import find_checkpoint
from engine.runtime.checkpoint.export import as_safetensors, weights_of


def keep_weights(module: nn.Module, results: Path) -> Path:
    """Writes the current weights of a module to the folder of results, and returns the file.

    It is named by their hash, so equal weights are one file; it stays, so that the run can be repeated.

    Raises StorageError if the file could not be written.
    """
    tensors = {name: value.detach().cpu() for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    data = as_safetensors(tensors)
    path = results / f"init-{hashlib.sha256(data).hexdigest()[:16]}.safetensors"
    if not path.exists():
        try:
            results.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StorageError(f"cannot make {str(results)!r}: {error.strerror}") from error
        write_named(path, data)
    return path


def load_weights(
    run: str | Path = "latest", step: int | None = None, results: str | Path = "results"
) -> dict[str, Tensor]:
    """Returns the state_dict in the newest good checkpoint of a run (a folder, a name, or ``latest``), or of a step.

    Raises:
        NothingMatchedError: there is no such run, or it has no checkpoint, or none of that step.
        StorageError: no checkpoint is good.
    """
    checkpoint = find_checkpoint(f"{run}{'' if step is None else f'@{step}'}", Path(results), lambda line: None)
    return weights_of(checkpoints_at(checkpoint.origin.place), checkpoint.manifest)
