"""The trials before training: of a layer, on fresh copies, and of a user's optimizer on the parameters of a layer."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from statistics import median

import torch
from torch import Tensor, nn

from engine.core.checks.trajectory import INPUT, impure_optimizer, once_only
from engine.core.errors import Problem, UserError
from engine.core.job.job import Job
from engine.core.units import Args
from engine.models.data import Data, keyed_generator
from engine.models.data_sources import largest
from engine.models.layers import Model, Tensors, sizes_of
from engine.models.slices import slice_of
from engine.runtime.device.action_clock import LiveBytes, in_blocks
from engine.runtime.device.device import HOST, Device, FlopCount
from engine.runtime.stage.buffers import lending, modules_of, snapshot_of
from engine.runtime.stage.class_optimizer import ClassOptimizer, Named, OptimizerClass, cloned
from engine.runtime.stage.optimizer import LayerOptimizer
from engine.runtime.stage.random_streams import own_generators, positions
from engine.runtime.stage.stage import Stage, build_layer, cut_off
from engine.runtime.stage.state_hash import hash_tensors

_ROUNDS = 3


def weigh_layers(job: Job, model: Model, data: Data, device: Device) -> list[int]:
    """Returns the weight of each layer for the partition: its parameters, or for ``profile`` its time in ns."""
    if job.partition == "parameters":
        layers = (build_layer(job, model, index) for index in range(len(model.layers)))
        return [sum(parameter.numel() for parameter in layer.parameters()) for layer in layers]
    batch = slice_of(data.microbatch(*largest(job, data), job.microbatch_size), 0, job.slices)
    inputs, weights = device.put_all(batch.inputs), []
    for index in range(len(model.layers)):
        stage = Stage(job, model, 0, index, index + 1, device, slices=1)
        targets = device.put_all(batch.targets) if stage.is_last else None
        times = []
        # The first round only warms caches.
        for microbatch in range(1 + _ROUNDS):
            start_ns = time.perf_counter_ns()
            outputs = stage.forward(0, microbatch, inputs, targets)
            ones = tuple(output.new_ones(output.shape) for output in outputs if output.requires_grad)
            stage.backward(0, microbatch, () if stage.is_last else ones)
            device.wait()
            times.append(time.perf_counter_ns() - start_ns)
        weights.append(max(1, round(median(times[1:]))))
        inputs = tuple(tensor.detach().requires_grad_(tensor.requires_grad) for tensor in outputs)
    return weights


# The trial of a layer: two fresh copies run two microbatches in different orders, which must not change a bit.
#
#     first copy   F0 F1 redo-F0 B0 B1       as in training with a recovery
#     second copy  redo-F1 F0 B0 F1 B1       redo-F1 with the first copy's buffers before F1, as in a takeover
#
# Outputs, gradients, weights and buffers must have the same bits in both copies, and in a second process.
#
# A straight layer (engine.models.traced.straight) has nothing that a forward could leave behind, on the host. It is
# tried to find kernels that read unwritten memory, and for the second process. Where several workers hold its stage,
# the first copies of two of them show both, if new memory of the second one is filled:
#
#     first copy   F0 B0
#     second copy  redo-F0       where no other worker holds the stage
#
# Of straight layers of a stage with the same operations and sizes, the first one is tried.

MICROBATCHES = (0, 1)
_MARK_DIGITS = 16
_MOST_ATTRIBUTES, _MOST_CHARACTERS = 3, 300  # in a message
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


class LayerDigests:
    """Hashes of the results of one layer; `sign` says which result first differed from an earlier one."""

    def __init__(self, name: str):
        self.name = name
        self.marks: dict[str, str] = {}
        self.sign = ""

    def note(self, what: str, tensors: Iterable[Tensor | tuple[str, Tensor]], when: str) -> None:
        """Records the hash of a result; if an earlier one had other bits, blames the layer, saying `when`."""
        named = (entry if isinstance(entry, tuple) else (str(place), entry) for place, entry in enumerate(tensors))
        mark = hash_tensors(named)[:_MARK_DIGITS]
        if self.marks.setdefault(what, mark) != mark:
            self.blame(f"its {what} differs {when}")

    def blame(self, sign: str) -> None:
        """Sets the sign, unless there is one already."""
        self.sign = self.sign or sign


class LayerTrial:
    """The trial of one layer; `inputs` and `targets` have one entry per microbatch, targets only for the last layer."""

    def __init__(
        self,
        job: Job,
        model: Model,
        index: int,
        inputs: list[Tensors],
        targets: list[Tensors] | None,
        device: Device = HOST,
    ):
        self.job, self.model, self.index, self.device = job, model, index, device
        self.inputs = inputs
        self.targets = targets if index == len(model.layers) - 1 else None
        self.is_straight = index in model.straight and device.is_host
        self.flops = self.residual = (0, 0)  # of a forward and a backward; bytes of a residual and of its input
        self.marked = LayerDigests(f"layer {index} ({model.layers[index].name})")
        self.outputs: list[Tensors] = []
        self._is_tried = False
        self._microbatches = range(len(inputs))
        calls = [self._called_with(microbatch) for microbatch in self._microbatches]
        self.marked.note(INPUT, (tensor for args, also in calls for tensor in (*args, *(also or ()))), "")
        self._before_second = snapshot_of(())  # the buffers before the second forward
        self._own: dict[str, object] = {}  # generators that the current copy has as attributes
        self._drawn: dict[tuple[str, str], object] = {}

    def first(self) -> list[Tensors]:
        """Tries the first copy; returns its outputs per microbatch, the inputs of the next layer. Errors propagate."""
        stage = self._built("")
        outputs = []
        for microbatch in self._microbatches:
            if not self.job.retains:  # else `Stage.forward` does it
                stage.history.note(microbatch)
            with FlopCount() as forward:
                outputs.append(self._forward(stage, microbatch, ""))
        self._before_second = stage.history.before(1)
        if not self.is_straight:
            with self._refusing("when its forward is redone"):
                self._redo(stage, 0, "when its forward is redone")
        for microbatch in self._microbatches:
            with FlopCount() as backward:
                self._backward(stage, microbatch, "")
        self.flops = forward.flops, backward.flops
        self._close(stage, "")
        self.outputs, self._is_tried = outputs, True
        return outputs

    def can_stand_for(self, other: LayerTrial) -> bool:
        """Returns whether another layer runs the same operations on tensors of the same sizes as this one."""
        alike = self.model.alike
        is_alike = self._is_tried and self.is_straight and alike.get(other.index) == alike.get(self.index, -1)
        return is_alike and [*map(_sizes, self.inputs)] == [*map(_sizes, other.inputs)]

    def take(self, tried: LayerTrial) -> list[Tensors]:
        """Takes the results of a layer that stands for this one, but for the weights; returns its outputs."""
        self._built("")
        self.flops, self.residual, self.outputs = tried.flops, tried.residual, tried.outputs
        return self.outputs

    def second(self) -> None:
        """Tries the second copy, unless another layer stands for this one."""
        if not self._is_tried:
            return
        when = "in a second copy, in another order"
        with self._refusing(when):
            stage = self._built("when it is built again")
            stage.counted = len(MICROBATCHES)  # as in a shadow that received a stream
            if self.is_straight:
                self._redo(stage, 0, "in a second copy")
                return
            with lending(modules_of(stage.layers.values()), self._before_second.copy().buffers()):
                self._redo(stage, 1, "in a copy that has not run the forwards before it")
            stage.forget_step()
            for microbatch in MICROBATCHES:
                self._forward(stage, microbatch, when)
                self._backward(stage, microbatch, when)
            self._close(stage, when)

    def _built(self, when: str) -> Stage:
        self._own = {}
        with self._watching("constructor"):
            stage = Stage(self.job, self.model, 0, self.index, self.index + 1, self.device, slices=1)
        layer = stage.layers[self.index]
        if not (self.is_straight and when):  # it is copied, not built
            self.marked.note("weight", layer.named_parameters(), when)
            self.marked.note("buffer", layer.named_buffers(), when)
        self._own = own_generators(layer)
        return stage

    def _forward(self, stage: Stage, microbatch: int, when: str) -> Tensors:
        with self._watching(f"forward of microbatch {microbatch}"), LiveBytes() as live:
            outputs = stage.forward(0, microbatch, *self._called_with(microbatch))
            self.residual = live.begin(), sum(in_blocks(each.nbytes) for each in self.inputs[microbatch])
        self._note_outputs(stage, microbatch, when)
        buffers = stage.layers[self.index].named_buffers()
        self.marked.note(f"buffer after the forward of microbatch {microbatch}", buffers, when)
        return cut_off(outputs)

    def _redo(self, stage: Stage, microbatch: int, when: str) -> None:
        with self._watching(f"forward of microbatch {microbatch}"):
            stage.redo_forward(0, microbatch, *self._called_with(microbatch))
        self._note_outputs(stage, microbatch, when)

    def _called_with(self, microbatch: int) -> tuple[Tensors, Tensors | None]:
        return self.inputs[microbatch], self.targets[microbatch] if self.targets else None

    def _note_outputs(self, stage: Stage, microbatch: int, when: str) -> None:
        residual = stage.residuals[microbatch]
        self.marked.note(f"output of microbatch {microbatch}", residual.outputs, when)
        if residual.loss is not None:
            self.marked.note(f"loss of microbatch {microbatch}", residual.loss.outputs, when)

    def _backward(self, stage: Stage, microbatch: int, when: str) -> None:
        residual = stage.residuals[microbatch]
        gradients: Tensors = ()
        if residual.loss is None:
            generator = keyed_generator(self.job.seed, "pure", self.index, microbatch)
            gradients = tuple(drawn_like(output, generator) for output in residual.outputs if output.requires_grad)
        with self._watching(f"backward of microbatch {microbatch}"):
            of_inputs = stage.backward(0, microbatch, gradients)
        self.marked.note(f"input gradient of microbatch {microbatch}", of_inputs, when)

    def _close(self, stage: Stage, when: str) -> None:
        layer = stage.layers[self.index]
        self.marked.note("weight gradient", stage.gradients()[self.index].items(), when)
        if not self.is_straight:
            self.marked.note("weight", layer.named_parameters(), "after a forward and a backward")

    @contextlib.contextmanager
    def _watching(self, what: str) -> Iterator[None]:
        """Blames a call that draws without a key: two such calls end elsewhere in the stream, unless they seed it."""
        before = positions(self._own, self.device)
        yield
        for stream, now in positions(self._own, self.device).items():
            if now != before.get(stream) and self._drawn.setdefault((what, stream), now) != now:
                self.marked.blame(f"its {what} draws from {stream}")

    @contextlib.contextmanager
    def _refusing(self, when: str) -> Iterator[None]:
        """Blames an exception in a repetition, because the first run raised none."""
        try:
            yield
        except Exception as error:
            self.marked.blame(f"it raises {type(error).__name__} {when}: {error}"[:_MOST_CHARACTERS])

    def changed_attributes(self) -> str:
        """Returns the attributes that a forward changes, for a message; an empty string if none is visible."""
        names: list[str] = []
        with contextlib.suppress(Exception):  # the layer is known to misbehave
            stage = Stage(self.job, self.model, 0, self.index, self.index + 1, self.device)
            layer = stage.layers[self.index]
            before = _attributes(layer)
            stage.forward(0, 0, *self._called_with(0))
            names = [name for name, text in _attributes(layer).items() if text != before.get(name)]
        return f"; a forward changes {', '.join(names[:_MOST_ATTRIBUTES])}" if names else ""


def _sizes(tensors: Tensors) -> list[object]:
    return [sizes_of(each) for each in tensors]


def drawn_like(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Returns normal random numbers of a tensor's shape, dtype and device; zeros for integers, which may be indices."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return torch.zeros_like(tensor, requires_grad=False)
    return torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor.device, tensor.dtype)


def _attributes(layer: nn.Module) -> dict[str, str]:
    return {
        f"{path}.{name}".lstrip("."): _text(value)
        for path, module in layer.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    }


def _text(value: object) -> str:
    """Returns a text that is equal for equal values: without addresses of objects."""
    if isinstance(value, Tensor):
        return hash_tensors([("", value)])
    return _ADDRESS.sub("", repr(value))


# The trial of a user's optimizer on the parameters of one layer: it must have no state but what replicas keep.
#
#     owner    one instance over all parameters, step after step
#     shadow   fresh instances in each step, one per parameter, in another order, with copies of the state by name
#     shards   with fsdp: the same on a part of each tensor
#
# All must give the same bits: after a takeover, in a resumed run and with shards, steps are taken as by the shadow
# here. Weights and gradients are random numbers drawn from a key, so every worker that holds the layer tries the same.

_STEPS = 5
_RATES = (1.0, 1.0, 0.5, 0.25, 0.25)  # of the peak
_SIZE = 0.1  # of gradients beside weights


class _UnequalError(Exception):
    """Replicas in a trial are not equal."""


class _Replica:
    """Parameters with their optimizer state, which any instance can step."""

    def __init__(self, weights: Mapping[str, Tensor]):
        self.weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        self.state: dict[str, Named] = {name: {} for name in weights}

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield f"weight {name}", weight
            for key, tensor in sorted(self.state[name].items()):
                yield f"state {key} of {name}", tensor


class OptimizerTrial:
    """The trial of a job's optimizer, which is user code."""

    def __init__(self, job: Job, device: Device = HOST):
        self._job, self._device = job, device
        self._own = OptimizerClass(job)

    def run(self, index: int, layer: nn.Module, optimizer: LayerOptimizer) -> str:
        """Returns a mark of the results on the parameters of a layer.

        Raises:
            UserError: a result differs, and in a second trial too.
            ReplicasDifferError: a result differs in the first trial only, so the optimizer may not be the cause.
        """
        try:
            return self._tried(index, layer, optimizer)
        except _UnequalError as unequal:
            with contextlib.suppress(_UnequalError):
                self._tried(index, layer, optimizer)
                raise once_only(f"optimizer {self._job.optimizer!r}: {unequal}") from None
            raise UserError([impure_optimizer(self._job.optimizer, str(unequal))]) from None

    def _tried(self, index: int, layer: nn.Module, optimizer: LayerOptimizer) -> str:
        groups = {name: group.args for name, group in optimizer.groups.items()}
        parameters = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
        if not parameters:
            return ""
        generator = keyed_generator(self._job.seed, "optimizer", index)

        def drawn() -> dict[str, Tensor]:
            return {
                name: self._device.put(torch.randn(like.shape, generator=generator, device="cpu").to(like.dtype))
                for name, like in parameters.items()
            }

        weights = drawn()
        owner, shadow = _Replica(weights), _Replica(weights)
        instance = self._own.instance(list(owner.weights.items()), groups)
        before = _attributes_of(instance)
        shards = [_Replica(part) for part in self._parts(weights)] if self._job.fsdp else []
        for step in range(_STEPS):
            gradients = {name: value * _SIZE for name, value in drawn().items()}
            rates = dict.fromkeys(weights, self._job.lr * _RATES[step])
            instance.step(cloned(gradients), rates, owner.state)
            shadow.state = {name: cloned(state) for name, state in shadow.state.items()}
            self._step_alone(shadow, gradients, groups, step)
            self._compare(owner, shadow, f"layer {index}: after step {step}", instance, before)
            for part, replica in zip(self._parts(gradients) if shards else (), shards, strict=True):
                self._step_alone(replica, part, groups, step)
        if shards:
            self._compare_shards(owner, shards)
        if changed := _changed(instance, before):
            raise _UnequalError(f"a step changes its attribute {changed!r}")
        return hash_tensors(owner.tensors())[:_MARK_DIGITS]

    def _step_alone(
        self, replica: _Replica, gradients: Mapping[str, Tensor], groups: Mapping[str, Args], step: int
    ) -> None:
        """Takes a step of each parameter with an instance of its own, the last parameter first."""
        for name, weight in reversed(list(replica.weights.items())):
            instance = self._own.instance([(name, weight)], groups)
            state = {name: replica.state[name]}
            instance.step({name: gradients[name].clone()}, {name: self._job.lr * _RATES[step]}, state)
            replica.state |= state

    def _parts(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Returns the shards of the tensors that the owners of a stage have."""
        shares: list[dict[str, Tensor]] = [{} for _ in range(self._job.pipelines)]
        for name, tensor in tensors.items():
            parts = tensor.chunk(self._job.pipelines) if tensor.dim() else (tensor,)
            for into, part in zip(shares, parts, strict=False):
                into[name] = part.clone()
        return shares

    def _compare(
        self, owner: _Replica, other: _Replica, when: str, instance: ClassOptimizer, before: Mapping[str, str]
    ) -> None:
        mine, theirs = dict(owner.tensors()), dict(other.tensors())
        for name in dict.fromkeys((*mine, *theirs)):
            if name in mine and name in theirs and _same(mine[name], theirs[name]):
                continue
            values = [
                hash_tensors([("", tensors[name])])[:_MARK_DIGITS] if name in tensors else "none"
                for tensors in (mine, theirs)
            ]
            changed = _changed(instance, before)
            also = f"; a step changes its attribute {changed!r}" if changed else ""
            raise _UnequalError(
                f"{when} the {name} differs between an owner and a shadow: {' and '.join(values)}{also}"
            )

    def _compare_shards(self, owner: _Replica, shards: Iterable[_Replica]) -> None:
        for name, weight in owner.weights.items():
            parts = [shard.weights[name].detach() for shard in shards if name in shard.weights]
            if not _same(torch.cat(parts) if weight.dim() else parts[0], weight):
                difference = f"the weight {name} differs if it is stepped in {len(parts)} shards"
                hint = "with fsdp each worker takes the step of its shard"
                expected = "an optimizer that works element by element, with fsdp"
                raise UserError([Problem("optimizer", expected, f"{self._job.optimizer!r}: {difference}", hint)])


def _same(one: Tensor, other: Tensor) -> bool:
    return hash_tensors([("", one)]) == hash_tensors([("", other)])


def _attributes_of(instance: ClassOptimizer) -> dict[str, str]:
    """Returns the attributes that torch's base class does not have, as texts."""
    base = vars(torch.optim.SGD([torch.zeros(1, device="cpu")]))
    return {name: _text_of(value) for name, value in vars(instance.optimizer).items() if name not in base}


def _text_of(value: object) -> str:
    """Returns a text of a tensor, number or text, and of those in a container; an empty one for other objects."""
    if isinstance(value, Tensor):
        return hash_tensors([("", value)])
    if isinstance(value, (list, tuple)):
        return ",".join(_text_of(item) for item in value if not isinstance(item, Tensor))
    if isinstance(value, dict):
        return ",".join(f"{_text(key)}:{_text(item)}" for key, item in value.items() if not isinstance(item, Tensor))
    return repr(value) if isinstance(value, (bool, int, float, str)) else ""


def _changed(instance: ClassOptimizer, before: Mapping[str, str]) -> str:
    now = _attributes_of(instance)
    return next((name for name in now if before.get(name) != now[name]), "")
