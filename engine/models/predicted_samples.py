"""The samples that a prediction runs over: those of a file, the training set in its order, or an evaluation set."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.core.errors import Problem, UserError, nearest
from engine.core.job.job import Job
from engine.core.job.samples import EvaluationPart
from engine.models.data import Columns, Data
from engine.models.data_sources import TRAINING, evaluation, evaluation_sets, num_samples
from engine.models.layers import Batch
from engine.models.losses import shapes_of

_FORMS = (".safetensors", ".npy")


class PredictedSamples:
    """The microbatches of a prediction, as `predict_args` of a job name their `file`, or their `samples`, and `rows`.

    Each sample is in one of them once, in order; the last one is filled from the beginning. Raises UserError for
    samples that the data do not have, for a set without end and without a number of rows, and for a file that does
    not have the inputs of the training.
    """

    def __init__(self, job: Job, data: Data):
        self._data, self._size = data, job.microbatch_size
        self._inputs: tuple[Tensor, ...] = ()
        self._targets: tuple[Tensor, ...] = ()
        args, most = job.predict_args, int(job.predict_args.get("rows", 0))
        self.name = file = str(args.get("file", ""))
        if file:
            first = data.microbatch(0, 0, 0, job.microbatch_size)
            samples = _given(Path(file), first, data.facts.form)
            self._inputs, self._targets = _fitted(samples, first, file, job.variable_shapes), first.targets
            count = len(self._inputs[0])
        else:
            sizes = {**evaluation_sets(data), TRAINING: num_samples(data)}
            self.name = str(args.get("samples", "")) or next(iter(sizes))
            if self.name not in sizes:
                hint = nearest(self.name, sizes)
                raise UserError([Problem("--samples", f"one of {', '.join(sizes)}", repr(self.name), hint)])
            count = sizes[self.name]
        if not (count or (most and self.name != TRAINING)):
            expected = "samples, or --limit ROWS for a set without end"
            raise UserError([Problem("--input" if file else "--samples", expected, f"none in {self.name}")])
        self.rows = min(count, most) if count and most else count or most

    def parts(self) -> tuple[EvaluationPart, ...]:
        """Returns the microbatches, in order."""
        size = self._size
        starts = range(0, self.rows, size)
        return tuple(EvaluationPart(self.name, at // size, min(size, self.rows - at)) for at in starts)

    def batch(self, index: int) -> Batch:
        """Returns a microbatch."""
        if not self._inputs:
            return evaluation(self._data, self.name, index, self._size)
        rows = torch.arange(index * self._size, (index + 1) * self._size, device="cpu") % len(self._inputs[0])
        return Batch(tuple(each[rows] for each in self._inputs), self._targets)


def _given(path: Path, first: Batch, form: object) -> tuple[Tensor, ...]:
    """Returns the inputs in a file, as the training has them; a file may leave the column of targets out."""
    tensors = _read(path)
    if isinstance(form, Columns):
        lacking = [name for name in form.names if name not in tensors and name != form.target]
        if lacking or not tensors:
            expected = f"tensors {', '.join(name for name in form.names if name != form.target)}"
            raise _refusal(path, expected, ", ".join(tensors))
        rows = len(next(iter(tensors.values())))
        if form.target and form.target not in tensors:
            target = first.targets[0]
            tensors = {**tensors, form.target: target[:1].expand(rows, *target.shape[1:])}
        return tuple(tensors[name] for name in form.names)
    if len(tensors) != len(first.inputs):
        raise _refusal(path, f"as many tensors as the training has inputs, {len(first.inputs)}", str(len(tensors)))
    return tuple(tensors[name] for name in sorted(tensors))


def _read(path: Path) -> Mapping[str, Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if path.suffix not in _FORMS:
        raise _refusal(path, f"a file {' or '.join(_FORMS)}", path.suffix or "no suffix")
    try:
        if path.suffix == ".npy":
            return {"input": torch.from_numpy(np.load(path, allow_pickle=False))}
        return load_file(path)
    except (OSError, ValueError, TypeError, SafetensorError) as error:
        raise _refusal(path, "a file that can be read", str(error)) from error


def _fitted(tensors: tuple[Tensor, ...], first: Batch, file: str, is_variable: bool) -> tuple[Tensor, ...]:
    """Returns the inputs with the dtypes of the training; raises UserError for other kinds, shapes or rows."""
    rows = tensors[0].shape[:1]
    for number, (ours, theirs) in enumerate(zip(tensors, first.inputs, strict=True)):
        is_kind = ours.is_floating_point() == theirs.is_floating_point() and ours.dim() and ours.shape[:1] == rows
        if not is_kind or (ours.shape[1:] != theirs.shape[1:] and not is_variable):
            row = f"{str(theirs.dtype).removeprefix('torch.')} {list(theirs.shape[1:])}"
            raise _refusal(Path(file), f"rows of {row} as input {number}, as in the training", shapes_of((ours,)))
    return tuple(ours.to(theirs.dtype) for ours, theirs in zip(tensors, first.inputs, strict=True))


def _refusal(path: Path, expected: str, text: str) -> UserError:
    return UserError([Problem("--input", expected, text, "", str(path))])
