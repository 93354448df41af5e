"""The outputs of a prediction: a file for each microbatch, which the last stage writes; merged in order at the end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import Problem, StorageError, UserError
from engine.files.atomic_write import storage_errors, write_atomically, write_named
from engine.models.losses import shapes_of

FORMS = (".safetensors", ".npy", ".csv")
LEFT_OUT = "-"  # in place of the dimension of an output


def _file_of(folder: Path, number: int) -> Path:
    return folder / f"{number:08}.safetensors"


def write_outputs(folder: Path, number: int, outputs: Sequence[Tensor], rows: int, size: int) -> None:
    """Writes the outputs of microbatch `number`, of `size` samples; `rows` is the number of samples in all of them.

    The file appears whole, but need not be on disk: it has to outlive this process only. Raises StorageError if it
    cannot be written.
    """
    from safetensors.torch import save

    tensors = {str(place): each.detach().cpu().clone() for place, each in enumerate(outputs)}
    data = save(tensors, metadata={"rows": str(rows), "size": str(size)})
    with storage_errors("write", folder):
        folder.mkdir(mode=0o700, exist_ok=True)
    write_atomically(_file_of(folder, number), data, is_synced=False)


def dims_of(text: str) -> tuple[int | None, ...]:
    """Returns the dimension of the samples in each output from ``0,1,-``; a ``-`` leaves an output out."""
    parts = [part.strip() for part in text.split(",")]
    are_known = all(part == LEFT_OUT or part.removeprefix("-").isdecimal() for part in parts)
    if not are_known or {*parts} == {LEFT_OUT}:
        raise UserError([Problem("--dims", "a dimension for each output, or - to leave it out: 0,1,-", repr(text))])
    return tuple(None if part == LEFT_OUT else int(part) for part in parts)


def merged_outputs(folder: Path, dims: Sequence[int | None] = (0,)) -> dict[str, Tensor]:
    """Returns the outputs over all samples, in order; `output` is the only one, else ``output.0`` is the first.

    `dims` are the dimensions in which samples are chunks; the last one holds for all further outputs.

    Raises:
        StorageError: the file of a microbatch is missing.
        UserError: an output has not a chunk per sample in its dimension.
    """
    from safetensors import safe_open

    chunks: list[list[Tensor]] = []
    rows = num_taken = 0
    for number in itertools.count():
        path = _file_of(folder, number)
        if not path.exists():
            raise StorageError(f"{path}: the outputs of microbatch {number} are missing")
        with safe_open(path, "pt") as file:
            facts = file.metadata()
            rows, size = int(facts["rows"]), int(facts["size"])
            tensors = [file.get_tensor(str(place)) for place in range(len(file.keys()))]
        here = min(size, rows - num_taken)
        chunks.append([_chunk(place, each, dims, size, here) for place, each in enumerate(tensors)])
        num_taken += here
        if num_taken >= rows:
            break
    merged = {}
    for place, parts in enumerate(zip(*chunks, strict=True)):
        if (dim := _dim(place, dims)) is not None:
            merged[f"output.{place}"] = _joined(place, parts, dim)
    return {"output": next(iter(merged.values()))} if len(merged) == 1 else merged


def _dim(place: int, dims: Sequence[int | None]) -> int | None:
    return dims[min(place, len(dims) - 1)]


def _chunk(place: int, tensor: Tensor, dims: Sequence[int | None], size: int, rows: int) -> Tensor:
    if (dim := _dim(place, dims)) is None:
        return tensor
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != size:
        expected = f"a dimension of {size}, the samples of a microbatch, in output {place}"
        hint = f"{shapes_of((tensor,))}; {LEFT_OUT} leaves an output out"
        raise UserError([Problem("--dims", expected, str(dim), hint)])
    return tensor.narrow(dim, 0, rows)


def _joined(place: int, parts: Sequence[Tensor], dim: int) -> Tensor:
    try:
        return torch.cat(tuple(parts), dim)
    except RuntimeError:
        shapes = ", ".join(sorted({shapes_of((part,)) for part in parts}))
        raise UserError([Problem("--dims", f"outputs {place} of one size beside dimension {dim}", shapes)]) from None


def refuse_output(output: Path) -> None:
    """Raises UserError for an output in none of the `FORMS`."""
    if output.suffix not in FORMS:
        raise UserError([Problem("--output", f"a file with one of {', '.join(FORMS)}", repr(str(output)))])


def write_merged(output: Path, tensors: dict[str, Tensor]) -> None:
    """Writes merged outputs to the user's file, ``.npy`` and ``.csv`` one; raises UserError or StorageError."""
    from safetensors.torch import save

    refuse_output(output)
    if output.suffix == ".safetensors":
        write_named(output, save({name: each.contiguous() for name, each in tensors.items()}))
        return
    tensor = next(iter(tensors.values()))
    is_table = tensor.dim() in (1, 2)
    if len(tensors) > 1 or (output.suffix == ".csv" and not is_table) or tensor.dtype == torch.bfloat16:
        fits = "one output with 1 or 2 dimensions" if output.suffix == ".csv" else "one output that numpy knows"
        shapes = ", ".join(f"{name} {shapes_of((each,))}" for name, each in tensors.items())
        raise UserError([Problem("--output", f"{fits} for {output.suffix}", shapes, ".safetensors takes all")])
    if output.suffix == ".npy":
        buffer = BytesIO()
        np.save(buffer, tensor.numpy(), allow_pickle=False)
        write_named(output, buffer.getvalue())
        return
    rows = tensor.reshape(len(tensor), -1).tolist()
    write_named(output, "".join(",".join(map(repr, row)) + "\n" for row in rows))
