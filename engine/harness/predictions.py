"""The merged outputs of a prediction, in the file that the user named."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from engine.files.run_folder import RunFolder


def dims_for(output: Path, dims: str) -> tuple[int | None, ...]:
    """Returns the dimensions that a text names; raises UserError for another text, or an output of no known form."""
    from engine.runtime.checkpoint.outputs import dims_of, refuse_output  # torch

    refuse_output(output)
    return dims_of(dims)


def write_prediction(run: Path, output: Path, dims: Sequence[int | None]) -> dict[str, list[int]]:
    """Writes the outputs of a run that predicted, merged by `dims`; returns their shapes by name.

    Raises UserError for outputs that cannot be merged so, StorageError if a file is missing or cannot be written.
    """
    from engine.runtime.checkpoint.outputs import merged_outputs, write_merged

    tensors = merged_outputs(RunFolder(run).outputs, dims)
    write_merged(output, tensors)
    return {name: list(tensor.shape) for name, tensor in tensors.items()}
