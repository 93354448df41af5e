"""One replica of one slot: the layers of a stage, their residuals, gradients and optimizers.

Every layer is a segment of its own for autograd, and gradients are passed back layer by layer, so the split into stages
cannot change a bit of the result. All randomness inside a layer comes from a key of (seed, step, pipeline, layer,
microbatch). Gradients are added in microbatch order.

Buffers and gradients change in place. A counter for each (`counted`, `added`) holds the next microbatch, and no other
is accepted. A counted forward or backward can run again with the same bits, and without changing either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward

from engine.core.errors import DivergedError, ensure
from engine.core.job.job import Job
from engine.core.job.torch_parts import LEAST_SCALE
from engine.core.ownership import turned
from engine.core.random_key import layer_key, weights_key
from engine.core.value import Kind
from engine.models.layers import MAX_TENSORS, Model, Tensors, Tie, as_tensors
from engine.models.losses import loss_of, metrics_of, shapes_of
from engine.models.memory_rules import refuse_what_cannot_be_kept
from engine.models.slices import called_with_slice, refuse_whole
from engine.models.user_code import RAISED, blame, running
from engine.runtime.device.device import HOST, Device
from engine.runtime.device.missing_gradients import is_missing, look_at, made, marked, marked_as, none_like
from engine.runtime.stage.buffers import (
    BufferHistory,
    BufferSnapshot,
    form_of,
    in_use,
    lending,
    modules_of,
    on_trial,
    refuse_another_form,
    snapshot_of,
)
from engine.runtime.stage.optimizer import layer_optimizers, trainable
from engine.runtime.transport.transport import Border, border_of, difference, laid_out_as

_VERSION = attrgetter("_version")


def cut_off(tensors: Tensors) -> Tensors:
    """Returns the same tensors as leaves of a new graph."""
    # A list: a generator makes one more call, and each is slow in a process that has just woken up.
    return tuple([marked_as(tensor.detach().requires_grad_(tensor.requires_grad), tensor) for tensor in tensors])


def gradient_of(leaf: Tensor) -> Tensor:
    """Returns a leaf's gradient; a missing one is minus zeros, kept by sums, and minus zeros become zeros."""
    return none_like(leaf) if leaf.grad is None else made(leaf.grad)


@dataclass(slots=True)
class Segment:
    """The autograd graph of one layer, from detached inputs to outputs; `place` names the layer."""

    inputs: Tensors
    outputs: Tensors
    place: str
    num_own: tuple[int, int] = (-1, -1)  # inputs and outputs before those that are the state of slices; -1: all

    @property
    def own_outputs(self) -> Tensors:
        """The outputs of the layer without its state."""
        return self.outputs if self.num_own[1] < 0 else self.outputs[: self.num_own[1]]

    def with_carry(self, gradients: Tensors, carry: Tensors | None) -> Tensors:
        """Returns the gradients of all outputs; `carry` has those of the state, None of the last slice."""
        if carry is None:
            carry = tuple(none_like(each) for each in self.outputs[self.num_own[1] :] if each.requires_grad)
        return *gradients, *carry

    def without_carry(self, gradients: Tensors) -> tuple[Tensors, Tensors]:
        """Returns the gradients of the layer's own inputs, and those of the state before."""
        num_own = sum(tensor.requires_grad for tensor in self.inputs[: self.num_own[0]])
        return gradients[:num_own], gradients[num_own:]

    def backward(self, gradients: Tensors, only_inputs: bool = False, keep_graph: bool = False) -> Tensors:
        """Runs the backward: adds to the gradients of the parameters, returns those of the inputs that need one.

        With `only_inputs` the parameters are left out. An unused input gets minus zeros, so the transfers of a step do
        not depend on the data. With `keep_graph` a backward for the weights may follow.
        """
        needed = tuple([tensor for tensor in self.inputs if tensor.requires_grad])
        # To the engine, an empty tuple would mean all leaves.
        if needed or not only_inputs:
            self._run(gradients, needed if only_inputs else (), keep_graph)
        return tuple(map(gradient_of, needed))

    def backward_weights(self, gradients: Tensors, parameters: Tensors) -> None:
        """Adds to the gradients of the parameters what the whole backward would; leaves the inputs out."""
        if parameters:
            self._run(gradients, parameters, keep_graph=False)

    def _run(self, gradients: Tensors, leaves: Tensors, keep_graph: bool) -> None:
        outputs = [output for output in self.outputs if output.requires_grad]
        roots = [pair for pair in zip(outputs, gradients, strict=bool(outputs)) if not is_missing(pair[1])]
        if not roots:
            return
        try:
            # torch.autograd.backward, which wraps this function, would import sympy: 0.3 s per worker.
            _engine_run_backward(
                *zip(*roots, strict=True), keep_graph, False, leaves, allow_unreachable=True, accumulate_grad=True
            )
        except RAISED as error:
            blame(error, f"the backward of {self.place}")
            raise


# For a later backward for the weights: (layer, segment, gradients of the segment's outputs).
Pending = list[tuple[int, Segment, Tensors]]


def groups_of(layers: Iterable[int], every: int) -> list[list[int]]:
    """Returns the groups of layers that are recomputed together; a group starts at each multiple of `every`."""
    groups: dict[int, list[int]] = {}
    for index in layers:
        groups.setdefault(index // every if every else 0, []).append(index)
    return list(groups.values())


@dataclass(slots=True)
class Checkpoint:
    """The inputs of a group of layers and its buffers before the forward: enough to run that forward again."""

    inputs: Tensors
    buffers: BufferSnapshot


@dataclass(slots=True)
class Residual:
    """What a stage keeps of a microbatch until its backward: segments or a checkpoint for each group of layers."""

    groups: list[list[Segment] | Checkpoint]
    outputs: Tensors
    loss: Segment | None = None
    counts: tuple[Tensors, float | None] = ((), None)  # the targets of the loss, and its weight
    make: Callable[[], Residual] | None = None  # of one that came from another worker: its graphs are made when needed

    def made(self) -> Residual:
        """Returns the residual with its graphs."""
        return self if self.make is None else self.make()


def began_in(residual: Residual, inputs: Tensors, first: int) -> str:
    """Returns in words where a forward made the first value that is not finite; `first` is the stage's first layer."""
    if not _are_finite(inputs):
        return f"before layer {first}, whose input is not finite" if first else "in the data"
    for group in residual.groups:
        for segment in group if isinstance(group, list) else ():  # a checkpoint has inputs only
            if not _are_finite(segment.outputs):
                return f"in {segment.place}"
    return "in the loss" if _are_finite(residual.outputs) else f"in layer {first} or a later one"


def _are_finite(tensors: Tensors) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors)


# Tied parameters: each use has its own copy and its own gradient; the gradients are added in layer order.
#
# This also holds for two uses on one worker, so the split into stages does not change a bit. Every copy takes the same
# optimizer step and stays equal to the others.


@dataclass(frozen=True, slots=True)
class Use:
    """One use of tie number `tie`: parameter `name` of layer `layer` in stage `stage`."""

    tie: int
    order: int
    stage: int
    layer: int
    name: str


def stage_of(layer: int, starts: Sequence[int]) -> int:
    """Returns the stage that contains a layer; `starts` has the first layer of each stage."""
    return max(stage for stage, start in enumerate(starts) if start <= layer)


def uses_of(ties: Sequence[Tie], starts: Sequence[int]) -> list[list[Use]]:
    """Returns the uses of each tie, in layer order."""
    return [
        [
            Use(number, order, stage_of(layer, starts), layer, name)
            for order, (layer, name) in enumerate(sorted(tie.uses))
        ]
        for number, tie in enumerate(ties)
    ]


def tied_stages(ties: Sequence[Tie], starts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of several stages that share a parameter, for `Grid.ties`."""
    groups = {tuple(sorted({use.stage for use in uses})) for uses in uses_of(ties, starts)}
    return tuple(sorted(group for group in groups if len(group) > 1))


def later_uses(ties: Sequence[Tie]) -> set[tuple[int, str]]:
    """Returns the uses after the first of each tie; gradient norms skip them, because they repeat the first."""
    return {use for tie in ties for use in sorted(tie.uses)[1:]}


def sum_in_layer_order(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the gradients of a tie's uses, given in layer order, as a new tensor."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total


class LossShare:
    """The gradient with which the backward of a microbatch starts: its share of the mean loss, times the scale."""

    def __init__(self, microbatches: int):
        self._microbatches = microbatches
        self._gradient: Tensor | None = None
        self._scale = 0.0

    def of(self, loss: Tensor, scale: float) -> Tensor:
        """Returns the gradient of a microbatch's loss; raises DivergedError if the scale is too small to help."""
        if self._gradient is None or scale != self._scale:
            if scale < LEAST_SCALE:
                raise DivergedError(f"the gradients are not finite, down to a scale of the loss of {scale}")
            share = (torch.ones(loss.shape, dtype=loss.dtype, device=loss.device) * scale) / self._microbatches
            self._gradient, self._scale = marked(share, is_missing=False), scale
        return self._gradient


def build_layer(job: Job, model: Model, index: int, device: Device = HOST) -> nn.Module:
    """Returns layer `index`, drawn on the host with the same bits everywhere; a later tied use copies the first."""
    layer = _built(job, model, index)
    if not device.is_host:
        modules = modules_of([layer])
        moved = snapshot_of(modules).put(device).buffers()
        for parameter in layer.parameters():
            parameter.data = device.put(parameter.data)  # a parameter with two names stays one
        for module, own in zip(modules, moved, strict=True):
            module._buffers.update(own)
    return layer


def _built(job: Job, model: Model, index: int) -> nn.Module:
    torch.default_generator.manual_seed(weights_key(job.seed, index))
    with running(f"the constructor of layer {index} ({model.layers[index].name})"):
        layer = model.layers[index].build()
    refuse_what_cannot_be_kept({index: layer})
    for module in layer.modules():
        # The input of a layer is a leaf for autograd and must not be overwritten; the bits are the same out of place.
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    for tie in model.ties:
        (first, first_name), *later = tie.uses
        for use, name in later:
            if use == index:
                source = _built(job, model, first)
                with torch.no_grad():
                    layer.get_parameter(name).copy_(source.get_parameter(first_name))
    return layer


class Stage:
    """A replica of layers `first` to `last` (exclusive) in one pipeline, on a device; trials have one slice."""

    def __init__(
        self, job: Job, model: Model, pipeline: int, first: int, last: int, device: Device = HOST, *, slices: int = 0
    ):
        self.job = job
        self.device = device
        self.model = model
        self.pipeline = pipeline
        self.layers = {index: build_layer(job, model, index, device) for index in range(first, last)}
        self._places = {index: self.where(index) for index in self.layers}
        for index, layer in self.layers.items() if job.slices > 1 else ():
            refuse_whole(model.layers[index], layer, self._places[index])
        self.is_last = last == len(model.layers)
        self.optimizers = layer_optimizers(job, model, self.layers)
        self.residuals: dict[int, Residual] = {}
        self.pending: dict[int, Pending] = {}
        self.is_sliced, self.slices = job.slices > 1, slices or job.slices
        self.carries: dict[int, dict[int, Tensors]] = {}  # gradients of the states before a slice, by layer
        self.away: dict[tuple[Kind, int], int] = {}  # on the host alone, and the bytes that this freed on the device
        self.losses: dict[int, float] = {}  # of the counted microbatches
        self.counted = 0  # forwards of this step that the buffers contain
        self.added = 0  # backwards of this step that the gradients contain
        self.groups = groups_of(self.layers, job.activation_checkpoint)
        self._of_groups: dict[int, BufferHistory] = {}  # by the first layer
        self.history = BufferHistory(modules_of(self.layers.values()))  # in the open step
        self._form = form_of(snapshot_of(self._modules(self.layers)))
        # The buffers of every pipeline at the step boundary, kept for a takeover; initially equal.
        self.boundary: tuple[Tensors, ...] = (self.copy_buffers(),) * job.pipelines if job.retains else ()
        self.border: Border | None = None
        self.peak_stash = 0
        self.keys: dict[tuple[int, int, int], int] = {}
        self._first_returned: dict[tuple[int, tuple[torch.Size, ...]], Border] = {}  # by layer and sizes of its inputs
        self._share = LossShare(job.program_microbatches)
        # Trained parameters by layer and name; with FSDP, the unsharded ones.
        self.weights = {index: dict(trainable(layer)) for index, layer in self.layers.items()}
        self._without_accumulator = self.trained()

    def buffers(self) -> Tensors:
        """Returns the distinct buffers of the layers, in order."""
        buffers = (buffer for layer in self.layers.values() for buffer in layer.buffers())
        return tuple({id(buffer): buffer for buffer in buffers}.values())

    def copy_buffers(self) -> Tensors:
        """Returns copies of the buffers; the buffers themselves if no worker can take over and read a copy."""
        if not self.job.retains:
            return self.buffers()
        snapshot = self.history.keep()
        refuse_another_form(self.layers, self._form, form_of(snapshot))  # receivers expect this form
        return tuple(snapshot.tensors())

    @property
    def num_stashed(self) -> int:
        """The number of microbatches whose residual is on the device."""
        return len(self.residuals) + len(self.pending) - len(self.away)

    def gradients(self) -> dict[int, dict[str, Tensor]]:
        """Returns the accumulated gradients by layer and name; minus zeros for a parameter without one."""
        with self.device.waiting():
            look_at(each.grad for each in self.trained() if each.grad is not None)
        with self.device.waiting():
            return {index: {name: gradient_of(p) for name, p in named.items()} for index, named in self.weights.items()}

    def forget_step(self) -> None:
        """Drops the residuals, gradients, losses and counters of the open step."""
        self.residuals, self.pending, self.carries, self.away, self.losses, self.keys = {}, {}, {}, {}, {}, {}
        self.counted = self.added = 0
        self.history.forget_step()
        self._without_accumulator = self.trained()
        for parameter in self._without_accumulator:
            parameter.grad = None

    def trained(self) -> list[Tensor]:
        """Returns the trained parameters, in order."""
        return [parameter for named in self.weights.values() for parameter in named.values()]

    def take_added(self, added: int, gradients: Sequence[Tensor | None]) -> None:
        """Replaces the accumulators with another replica's after `added` backwards; None: there is no gradient yet."""
        ensure(added > self.added, f"{added} backwards where {self.added} are in")
        self.added = added
        for parameter, gradient in zip(self.trained(), gradients, strict=True):
            parameter.grad = None if gradient is None else laid_out_as(parameter, gradient)
        self._without_accumulator = [parameter for parameter in self.trained() if parameter.grad is None]

    def prepare(self, step: int, microbatch: int) -> None:
        """Computes the random keys of a later forward in advance."""
        for index in self.layers:
            self.keys[step, index, microbatch] = self._key(step, index, microbatch)

    def _key(self, step: int, index: int, microbatch: int) -> int:
        return layer_key(self.job.seed, step, self.pipeline, index, microbatch)

    def forward(
        self, step: int, microbatch: int, inputs: Tensors, targets: Tensors | None, weight: float | None = None
    ) -> Tensors:
        """Runs the next forward, keeps its residual and returns the outputs; the last stage also computes the loss.

        A `weight` multiplies the loss. Raises DivergedError for a loss that is not finite, except in float16;
        TypeError for outputs that do not fit.
        """
        ensure(microbatch == self.counted, f"forward {microbatch} where {self.counted} are in")
        if self.job.retains:
            self.history.note(microbatch)
        residual = self._forward(step, microbatch, inputs, targets, weight)
        if residual.loss is not None:
            loss = residual.loss.outputs[0].item()
            if not math.isfinite(loss) and self.job.dtype != "float16":  # where such gradients skip the step
                raise DivergedError(
                    f"the loss is {loss} at step {step}, pipeline {self.pipeline}, microbatch {microbatch}; it began "
                    f"{began_in(residual, inputs, min(self.layers))}; a lower lr or a clip_norm often helps"
                )
            self.losses[microbatch] = loss
        self.counted += 1
        return residual.outputs

    def redo_forward(
        self, step: int, microbatch: int, inputs: Tensors, targets: Tensors | None, weight: float | None = None
    ) -> Tensors:
        """Runs a counted forward again from the buffers before it; buffers, losses and counter do not change."""
        ensure(microbatch < self.counted, f"forward {microbatch} is redone where {self.counted} are in")
        with lending(self.history.modules, self.history.before(microbatch).copy().buffers()):
            return self._forward(step, microbatch, inputs, targets, weight).outputs

    def _forward(
        self, step: int, microbatch: int, inputs: Tensors, targets: Tensors | None, weight: float | None
    ) -> Residual:
        residual = Residual([], inputs)
        for group in self.groups:
            checkpoint = None
            if self.job.activation_checkpoint:
                history = self._of_groups.setdefault(group[0], BufferHistory(self._modules(group)))
                checkpoint = Checkpoint(residual.outputs, history.keep())
            segments = self._run(group, step, microbatch, residual.outputs)
            outputs = segments[-1].own_outputs
            residual.outputs = cut_off(outputs) if checkpoint else outputs  # drops the graph
            residual.groups.append(checkpoint or segments)
        if self.border is not None:
            self._check(max(self.layers), self.border, residual.outputs)
        if targets is not None:
            cut = cut_off(residual.outputs)
            residual.loss = Segment(cut, (self.weighted_loss(cut, targets, weight),), "the loss")
            residual.counts = targets, weight
        self.residuals[microbatch] = residual
        self.away.pop((Kind.RESIDUAL, microbatch), None)
        self.peak_stash = max(self.peak_stash, self.num_stashed)
        return residual

    def weighted_loss(self, outputs: Tensors, targets: Tensors, weight: float | None) -> Tensor:
        """Returns the loss of a microbatch, times its weight."""
        if weight == 0:  # no target counts: the mean over them is no number
            return outputs[0].float().sum() * 0.0
        loss = loss_of(self.model, outputs, targets)
        return loss if weight is None else loss * weight

    def backward(self, step: int, microbatch: int, gradients: Tensors) -> Tensors:
        """Runs the next backward, adds to the gradients of the parameters and frees the residual.

        `gradients` belong to the outputs that require one (the last stage gets none). Returns the gradients of the
        inputs that require one.
        """
        ensure(microbatch == self.added, f"backward {microbatch} where {self.added} are in")
        of_inputs = self._backward(step, microbatch, gradients)
        if self._without_accumulator:
            carried = (each for of_layer in self.carries.get(microbatch, {}).values() for each in of_layer)
            self._own_accumulators((*gradients, *of_inputs, *carried))
        self.added += 1
        return of_inputs

    def backward_input(self, step: int, microbatch: int, gradients: Tensors) -> Tensors:
        """Runs a backward for the inputs only, frees the residual and returns the gradients of the inputs.

        It keeps the segments for the backward for the weights, unless that one is counted already.
        """
        pending: Pending = []
        of_inputs = self._backward(step, microbatch, gradients, pending)
        if microbatch >= self.added:
            self.pending[microbatch] = pending
        return of_inputs

    def backward_weights(self, microbatch: int) -> None:
        """Runs the next backward for the weights; adds the same bits as the whole backward."""
        ensure(microbatch == self.added, f"backward {microbatch} where {self.added} are in")
        for index, segment, gradients in self.pending.pop(microbatch):
            segment.backward_weights(gradients, tuple(self.weights[index].values()))
            if self._without_accumulator:
                self._own_accumulators(gradients)
        self.added += 1

    def _backward(self, step: int, microbatch: int, gradients: Tensors, pending: Pending | None = None) -> Tensors:
        """Runs a whole backward; with `pending`, runs one for the inputs only and adds the segments to `pending`."""
        behind = self.carries.pop(microbatch - 1) if microbatch % self.slices else {}
        before: dict[int, Tensors] = {}
        residual = self.residuals.pop(turned(microbatch, self.slices)).made()
        if residual.loss is not None:
            gradients = residual.loss.backward((self._share.of(residual.loss.outputs[0], self.loss_scale),))
        for group, entry in zip(reversed(self.groups), reversed(residual.groups), strict=True):
            segments = self._redo(group, step, microbatch, entry) if isinstance(entry, Checkpoint) else entry
            for index, segment in zip(reversed(group), reversed(segments), strict=True):
                if self.is_sliced:
                    gradients = segment.with_carry(gradients, behind.get(index))
                if pending is not None:
                    pending.append((index, segment, gradients))
                gradients = segment.backward(gradients, pending is not None, pending is not None)
                if self.is_sliced:
                    gradients, before[index] = segment.without_carry(gradients)
        if (microbatch + 1) % self.slices:
            self.carries[microbatch] = before
        return gradients

    def _own_accumulators(self, handed: Tensors) -> None:
        """Copies accumulators that share memory with `handed`: autograd may accumulate into a tensor it was given."""
        shared = {tensor.untyped_storage().data_ptr() for tensor in handed}
        for parameter in self._without_accumulator:
            if parameter.grad is not None and parameter.grad.untyped_storage().data_ptr() in shared:
                parameter.grad = parameter.grad.clone()
        self._without_accumulator = [parameter for parameter in self._without_accumulator if parameter.grad is None]

    def evaluate(self, inputs: Tensors) -> Tensors:
        """Returns the outputs in evaluation mode: no dropout, no gradients, buffers unchanged."""
        with in_use(self._modules(self.layers)):
            for index in self.layers:
                inputs = self.call(index, inputs)
        return inputs

    def evaluate_loss(self, outputs: Tensors, targets: Tensors) -> tuple[float, dict[str, float]]:
        """Returns the loss of a validation microbatch, and its metrics by name."""
        with torch.no_grad():
            return float(loss_of(self.model, outputs, targets)), metrics_of(self.model, outputs, targets)

    def probe(self, inputs: Tensors, targets: Tensors | None = None, validation: Sequence[Tensors] = ()) -> Border:
        """Runs the layers once on `inputs`; sets and returns the border behind them. Buffers and gradients stay.

        The last stage tries loss and metric too. Raises UserError for buffers, TypeError for outputs that break a rule.
        What the layers have returned before, on other inputs, counts for nothing.
        """
        self._first_returned.clear()
        with on_trial(self.layers, self.model):
            outputs = self._run(list(self.layers), 0, 0, inputs)[-1].own_outputs
            if targets is not None:
                loss_of(self.model, outputs, targets)
            for of_validation in validation:
                self.evaluate_loss(self.evaluate(inputs) if self.model.num_loss_outputs else outputs, of_validation)
        self.border = border_of(outputs, is_open=self.job.variable_shapes)
        if len(outputs) > MAX_TENSORS:
            raise self._wrong(max(self.layers), f"at most {MAX_TENSORS} tensors leave a stage, found {len(outputs)}")
        return self.border

    def where(self, index: int) -> str:
        """Returns the name of a layer for messages."""
        return f"layer {index} ({self.model.layers[index].name})"

    def _run(self, group: Sequence[int], step: int, microbatch: int, inputs: Tensors) -> list[Segment]:
        segments, number = [], microbatch % self.slices
        states = self._states_behind(microbatch - 1) if number else {}
        for index in group:
            key = self.keys.pop((step, index, microbatch), None)
            self.device.seed(self._key(step, index, microbatch) if key is None else key)
            cut = cut_off((*inputs, *states.get(index, ())))
            before = [*map(_VERSION, cut)]
            num_inputs = len(inputs)
            if self.is_sliced:
                outputs, state = self._call_slice(index, cut, num_inputs, number)
            else:
                outputs, state = self.call(index, cut), ()
            if [*map(_VERSION, cut)] != before:  # a recovery needs the input
                raise self._wrong(index, "a layer must not overwrite what it is called with")
            sizes = tuple(each.shape for each in cut) if self.job.variable_shapes else ()
            expected = self._first_returned.get((index, sizes))
            if expected is None:
                expected = self._first_returned[index, sizes] = border_of(outputs)
            self._check(index, expected, outputs)
            segments.append(Segment(cut, (*outputs, *state), self._places[index], (num_inputs, len(outputs))))
            inputs = outputs
        return segments

    def _states_behind(self, microbatch: int) -> dict[int, Tensors]:
        """Returns the state of each layer behind a slice."""
        groups = self.residuals[microbatch].made().groups
        segments = (each for group in groups if isinstance(group, list) for each in group)
        return {index: each.outputs[each.num_own[1] :] for index, each in zip(self.layers, segments, strict=True)}

    def call(self, index: int, inputs: Tensors) -> Tensors:
        """Returns the outputs of one layer, contiguous like after a transfer: strides can decide bits."""
        layer, where = self.layers[index], self._places[index]
        return self._called(index, inputs, lambda: (as_tensors(layer(*inputs), where), ()))[0]

    def _call_slice(self, index: int, inputs: Tensors, num_own: int, number: int) -> tuple[Tensors, Tensors]:
        own, state = inputs[:num_own], inputs[num_own:]
        start = number * own[0].shape[1]
        layer, where = self.layers[index], self.where(index)
        return self._called(index, inputs, lambda: called_with_slice(layer, own, start, state, where))

    def _called(
        self, index: int, inputs: Tensors, call: Callable[[], tuple[Tensors, Tensors]]
    ) -> tuple[Tensors, Tensors]:
        try:
            if self.job.dtype == "float32":
                outputs, state = call()
            else:
                with self.device.autocast(getattr(torch, self.job.dtype)):
                    outputs, state = call()
        except RAISED as error:
            blame(error, self.where(index), self.layers[index], f"called with {shapes_of(inputs)}")
            raise
        return tuple(map(Tensor.contiguous, outputs)), tuple(map(Tensor.contiguous, state))

    def _check(self, index: int, expected: Border, outputs: Tensors) -> None:
        if wrong := difference(expected, outputs):
            raise self._wrong(index, f"a layer must return the same shapes every time, found {wrong}")

    def _wrong(self, index: int, text: str) -> TypeError:
        error = TypeError(f"{self.where(index)}: {text}")
        blame(error, self.where(index), self.layers[index])
        return error

    def _redo(self, group: Sequence[int], step: int, microbatch: int, checkpoint: Checkpoint) -> list[Segment]:
        """Repeats the forwards of a group from a checkpoint, with the same bits and without side effects."""
        with lending(self._modules(group), checkpoint.buffers.copy().buffers()):
            return self._run(group, step, microbatch, checkpoint.inputs)

    @property
    def loss_scale(self) -> float:
        """The scale of the loss in the open step; 1 unless the dtype is float16."""
        return next(iter(self.optimizers.values())).loss_scale

    def _modules(self, group: Iterable[int]) -> list[nn.Module]:
        return modules_of(self.layers[index] for index in group)
