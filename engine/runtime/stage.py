"""One stage on one worker: its layers, what their forwards keep, their gradients and their optimizers.

Every layer is a segment of its own for autograd: its inputs are cut off from the layer before, and gradients are
handed back layer by layer. So where a pipeline is cut into stages cannot change a bit of the result. Everything random
inside a layer is drawn from a key of (seed, step, pipeline, layer, microbatch); gradients add up in microbatch order.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from engine.core.errors import DivergedError
from engine.core.job import Job
from engine.core.random_key import layer_key, weights_key
from engine.models.layers import Model, Tensors, as_tensors
from engine.runtime.optimizer import LayerOptimizer
from engine.runtime.tensor_spec import Border, border_of, check_border

Buffers = list[dict[str, Tensor | None]]  # of each module of some layers, in order


@dataclass(slots=True)
class _Segment:
    """What one layer keeps for its backward: the inputs it was cut off at, and its outputs."""

    inputs: Tensors
    outputs: Tensors


@dataclass(slots=True)
class _Checkpoint:
    """What it takes to redo the forward of a group of layers: its inputs, and its buffers as they were before."""

    inputs: Tensors
    buffers: Buffers


@dataclass(slots=True)
class Residual:
    """What a stage keeps of one microbatch: per group of layers either all segments, or what it takes to redo it."""

    groups: list[list[_Segment] | _Checkpoint]
    outputs: Tensors
    loss: _Segment | None = None


class Stage:
    """Layers `first` to `last` (exclusive) of a model for one pipeline."""

    def __init__(self, job: Job, model: Model, pipeline: int, first: int, last: int):
        self.job = job
        self.model = model
        self.pipeline = pipeline
        self.layers = {index: build_layer(job, model, index) for index in range(first, last)}
        self.is_last = last == len(model.layers)
        self.optimizers = {index: LayerOptimizer(job, layer) for index, layer in self.layers.items()}
        self.residuals: dict[int, Residual] = {}
        self.losses: list[float] = []
        self.border: Border | None = None
        self._first_returned: dict[int, Border] = {}
        self.peak_stash = 0
        self.keys: dict[tuple[int, int, int], int] = {}
        self._share: Tensor | None = None

    def prepare(self, step: int, microbatch: int) -> None:
        """Computes the keys of a coming forward."""
        for index in self.layers:
            self.keys[step, index, microbatch] = self._key(step, index, microbatch)

    def _key(self, step: int, index: int, microbatch: int) -> int:
        return layer_key(self.job.seed, step, self.pipeline, index, microbatch)

    def forward(self, step: int, microbatch: int, inputs: Tensors, targets: Tensors | None) -> Tensors:
        """Runs the layers on one microbatch and keeps its residual; the last stage also computes the loss."""
        residual = Residual([], inputs)
        for group in self._groups():
            checkpoint = None
            if self.job.activation_checkpoint:
                checkpoint = _Checkpoint(residual.outputs, self._copy_buffers(group))
            segments = self._run(group, step, microbatch, residual.outputs)
            residual.outputs = segments[-1].outputs
            residual.groups.append(checkpoint or segments)
        if self.border is not None:
            check_border(self.border, residual.outputs, self.where(max(self.layers)))
        if targets is not None:
            residual.loss = self._run_loss(step, microbatch, residual.outputs, targets)
        self.residuals[microbatch] = residual
        self.peak_stash = max(self.peak_stash, len(self.residuals))
        return residual.outputs

    def backward(self, step: int, microbatch: int, gradients: Tensors) -> Tensors:
        """Runs the backward of one microbatch; adds to the parameters' gradients, frees the residual.

        `gradients` are those of the outputs that need one (none for the last stage); returns those of the inputs.
        """
        residual = self.residuals.pop(microbatch)
        if residual.loss is not None:
            gradients = _backward(residual.loss, (self._share_of(residual.loss.outputs[0]),))
        for group, kept in zip(reversed(self._groups()), reversed(residual.groups), strict=True):
            segments = self._redo(group, step, microbatch, kept) if isinstance(kept, _Checkpoint) else kept
            for segment in reversed(segments):
                gradients = _backward(segment, gradients)
        return gradients

    def evaluate(self, inputs: Tensors) -> Tensors:
        """Runs the layers as in use: no dropout, no gradients, buffers unchanged."""
        modules = [module for layer in self.layers.values() for module in layer.modules() if module.training]
        for module in modules:
            module.training = False
        with torch.no_grad():
            for index in self.layers:
                inputs = self._call(index, inputs)
        # A user may have frozen the statistics of a batch norm: what was not training before is not afterwards.
        for module in modules:
            module.training = True
        return inputs

    def evaluate_loss(self, outputs: Tensors, targets: Tensors) -> tuple[float, float | None]:
        """Returns the loss of a validation microbatch, and the model's metric if it has one."""
        with torch.no_grad():
            outputs = _in_float32(outputs)
            metric = self.model.metric
            return float(self.model.loss(outputs, targets)), metric and float(metric(outputs, targets))

    def probe(self, inputs: Tensors) -> Border:
        """Runs the layers once on `inputs` to learn the border behind them; leaves no trace in buffers or gradients."""
        layers = list(self.layers)
        with self._lending(layers, self._copy_buffers(layers)):
            self.border = border_of(self._run(layers, 0, 0, inputs)[-1].outputs)
        return self.border

    def where(self, index: int) -> str:
        """Returns the name of a layer for messages."""
        return f"layer {index} ({self.model.layers[index].name})"

    def _groups(self) -> list[list[int]]:
        """Returns the layers in the groups that are recomputed together; a group begins at each multiple of k."""
        every = self.job.activation_checkpoint
        if not every:
            return [list(self.layers)]
        groups: dict[int, list[int]] = {}
        for index in self.layers:
            groups.setdefault(index // every, []).append(index)
        return list(groups.values())

    def _run(self, group: Sequence[int], step: int, microbatch: int, inputs: Tensors) -> list[_Segment]:
        segments = []
        for index in group:
            key = self.keys.pop((step, index, microbatch), None)
            torch.default_generator.manual_seed(self._key(step, index, microbatch) if key is None else key)
            cut = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in inputs)
            outputs = self._call(index, cut)
            check_border(self._first_returned.setdefault(index, border_of(outputs)), outputs, self.where(index))
            segments.append(_Segment(cut, outputs))
            inputs = outputs
        return segments

    def _call(self, index: int, inputs: Tensors) -> Tensors:
        """Calls one layer; strides can decide bits, so what it hands on is contiguous, as a transfer would make it."""
        try:
            with self._autocast():
                outputs = as_tensors(self.layers[index](*inputs), self.where(index))
        except Exception as error:
            error.add_note(f"in {self.where(index)}")
            raise
        return tuple(output.contiguous() for output in outputs)

    def _redo(self, group: Sequence[int], step: int, microbatch: int, kept: _Checkpoint) -> list[_Segment]:
        """Runs forwards again that have counted already: pure, with the same bits."""
        with self._lending(group, kept.buffers):
            return self._run(group, step, microbatch, kept.inputs)

    def _run_loss(self, step: int, microbatch: int, outputs: Tensors, targets: Tensors) -> _Segment:
        cut = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
        loss = self.model.loss(_in_float32(cut), targets)
        self.losses.append(loss.item())
        if not math.isfinite(self.losses[-1]):
            raise DivergedError(
                f"the loss is {self.losses[-1]} at step {step}, pipeline {self.pipeline}, microbatch {microbatch}; "
                "a lower lr or a clip_norm often helps"
            )
        return _Segment(cut, (loss,))

    def _share_of(self, loss: Tensor) -> Tensor:
        """Returns the gradient of a microbatch's loss: the loss of a step is their mean."""
        if self._share is None:
            self._share = torch.ones_like(loss) / self.job.microbatches
        return self._share

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        if self.job.dtype == "bfloat16":
            return torch.autocast("cpu", dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _modules(self, group: Sequence[int]) -> list[nn.Module]:
        return [module for index in group for module in self.layers[index].modules()]

    def _copy_buffers(self, group: Sequence[int]) -> Buffers:
        return [
            {name: None if buffer is None else buffer.clone() for name, buffer in module._buffers.items()}
            for module in self._modules(group)
        ]

    @contextlib.contextmanager
    def _lending(self, group: Sequence[int], buffers: Buffers) -> Iterator[None]:
        """Lends these buffers to the layers for a forward that must leave no trace in their own (BatchNorm).

        The tensors themselves are swapped, because autograd may have saved the lent ones for the backward.
        """
        modules = self._modules(group)
        kept = [dict(module._buffers) for module in modules]
        for module, lent in zip(modules, buffers, strict=True):
            module._buffers.update(lent)
        try:
            yield
        finally:
            for module, own in zip(modules, kept, strict=True):
                module._buffers.update(own)


def build_layer(job: Job, model: Model, index: int) -> nn.Module:
    """Builds one layer with the weights of its own key; a later use of a tied parameter starts as the first."""
    torch.default_generator.manual_seed(weights_key(job.seed, index))
    layer = model.layers[index].build()
    for module in layer.modules():
        # The input of a layer is a leaf for autograd, which nothing may overwrite; out of place gives the same bits.
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    for tie in model.ties:
        (first, first_name), *later = tie.uses
        for use, name in later:
            if use == index:
                source = build_layer(job, model, first)
                with torch.no_grad():
                    layer.get_parameter(name).copy_(source.get_parameter(first_name))
    return layer


def _backward(segment: _Segment, gradients: Tensors) -> Tensors:
    """Runs one segment's backward; a missing gradient counts as zeros, so that what is sent does not depend on use."""
    outputs = tuple(output for output in segment.outputs if output.requires_grad)
    if outputs:
        # What torch.autograd.backward calls; the wrapper would import sympy to compare shapes, 0.3 s in every worker.
        _engine_run_backward(outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
    needed = [tensor for tensor in segment.inputs if tensor.requires_grad]
    return tuple(torch.zeros_like(tensor) if tensor.grad is None else tensor.grad for tensor in needed)


def _in_float32(tensors: Tensors) -> Tensors:
    return tuple(tensor.float() if tensor.dtype is torch.bfloat16 else tensor for tensor in tensors)


def squared_norm(gradients: Sequence[Tensor]) -> float:
    """Returns the sum of squares of some gradients in float64, added in the order given."""
    total = 0.0
    for gradient in gradients:
        total += torch.linalg.vector_norm(gradient, dtype=torch.float64).item() ** 2
    return total
