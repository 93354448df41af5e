"""The trial of a user's optimizer on the parameters of one layer: the state that replicas keep must be all its state.

    owner    one instance over all parameters, step after step
    shadow   in each step fresh instances, one for each parameter, in another order, with copies of the state by name
    shards   with fsdp: the same on a part of each tensor

All must give the same bits: a shadow that takes over, a resumed run and a shard step as the shadow does here. Weights
and gradients are random numbers drawn from a key, so that each worker that holds the layer tries the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from engine.core.checks.purity import impure_optimizer, once_only
from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.core.scalar import Args
from engine.models.data import keyed_generator
from engine.runtime.device.device import HOST, Device
from engine.runtime.optimizers.class_optimizer import ClassOptimizer, Named, OptimizerClass
from engine.runtime.stage.optimizer import LayerOptimizer
from engine.runtime.stage.state_hash import hash_tensors

_STEPS = 5
_RATES = (1.0, 1.0, 0.5, 0.25, 0.25)  # of the peak
_SIZE = 0.1  # of gradients beside weights
_MARK_DIGITS = 16


class _UnequalError(Exception):
    """Replicas in a trial are not equal; `found` says where."""

    def __init__(self, found: str):
        super().__init__(found)
        self.found = found


class _Replica:
    """Parameters with their optimizer state, which any instances can step."""

    def __init__(self, weights: Mapping[str, Tensor]):
        self.weights = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
        self.state: dict[str, Named] = {name: {} for name in weights}

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        for name, weight in self.weights.items():
            yield f"weight {name}", weight
            for key, tensor in sorted(self.state[name].items()):
                yield f"state {key} of {name}", tensor


class OptimizerTrial:
    """The trial of a job's optimizer, which is code of the user's."""

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
                raise once_only(f"optimizer {self._job.optimizer!r}: {unequal.found}") from None
            raise UserError([impure_optimizer(self._job.optimizer, unequal.found)]) from None

    def _tried(self, index: int, layer: nn.Module, optimizer: LayerOptimizer) -> str:
        groups = {name: each.args for name, each in optimizer.groups.items()}
        shapes = [(name, each.shape, each.dtype) for name, each in layer.named_parameters() if each.requires_grad]
        if not shapes:
            return ""
        generator = keyed_generator(self._job.seed, "optimizer", index)

        def drawn() -> dict[str, Tensor]:
            values = (
                (name, torch.randn(shape, generator=generator, device="cpu"), dtype) for name, shape, dtype in shapes
            )
            return {name: self._device.put(each.to(dtype)) for name, each, dtype in values}

        weights = drawn()
        owner, shadow = _Replica(weights), _Replica(weights)
        instance = self._own.made(list(owner.weights.items()), groups)
        before = _attributes(instance)
        shards = [_Replica(each) for each in self._parts(weights)] if self._job.fsdp else []
        for step in range(_STEPS):
            gradients = {name: each * _SIZE for name, each in drawn().items()}
            self._step(instance, owner, gradients, step)
            shadow.state = {
                name: {key: each.clone() for key, each in state.items()} for name, state in shadow.state.items()
            }
            self._step_alone(shadow, gradients, groups, step)
            self._compare(owner, shadow, f"layer {index}: after step {step}", instance, before)
            for part, replica in zip(self._parts(gradients) if shards else (), shards, strict=True):
                self._step_alone(replica, part, groups, step)
        if shards:
            self._compare_shards(owner, shards)
        if changed := _changed(instance, before):
            raise _UnequalError(f"a step changes its attribute {changed!r}")
        return hash_tensors(owner.tensors())[:_MARK_DIGITS]

    def _step(self, instance: ClassOptimizer, replica: _Replica, gradients: Mapping[str, Tensor], step: int) -> None:
        rates = dict.fromkeys(replica.weights, self._job.lr * _RATES[step])
        instance.step({name: gradients[name].clone() for name in replica.weights}, rates, replica.state)

    def _step_alone(
        self, replica: _Replica, gradients: Mapping[str, Tensor], groups: Mapping[str, Args], step: int
    ) -> None:
        """Takes a step of each parameter with an instance of its own, the last parameter first."""
        for name, weight in reversed(list(replica.weights.items())):
            instance = self._own.made([(name, weight)], groups)
            state = {name: replica.state[name]}
            instance.step({name: gradients[name].clone()}, {name: self._job.lr * _RATES[step]}, state)
            replica.state |= state

    def _parts(self, tensors: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
        """Returns the tensors as the owners of a stage share them: parts along the first dimension."""
        found: list[dict[str, Tensor]] = [{} for _ in range(self._job.pipelines)]
        for name, tensor in tensors.items():
            parts = tensor.chunk(self._job.pipelines) if tensor.dim() else (tensor,)
            for into, part in zip(found, parts, strict=False):
                into[name] = part.clone()
        return found

    def _compare(
        self, owner: _Replica, other: _Replica, when: str, instance: ClassOptimizer, before: Mapping[str, str]
    ) -> None:
        mine, theirs = dict(owner.tensors()), dict(other.tensors())
        for name in dict.fromkeys((*mine, *theirs)):
            if name in mine and name in theirs and _same(mine[name], theirs[name]):
                continue
            held = " and ".join(_held(each.get(name)) for each in (mine, theirs))
            changed = _changed(instance, before)
            also = f"; a step changes its attribute {changed!r}" if changed else ""
            raise _UnequalError(f"{when} the {name} differs between an owner and a shadow: {held}{also}")

    def _compare_shards(self, owner: _Replica, shards: Iterable[_Replica]) -> None:
        for name, weight in owner.weights.items():
            parts = [each.weights[name].detach() for each in shards if name in each.weights]
            if not _same(torch.cat(parts) if weight.dim() else parts[0], weight):
                found = f"the weight {name} differs if it is stepped in {len(parts)} shards"
                hint = "with fsdp each worker takes the step of its shard"
                expected = "an optimizer that works element by element, with fsdp"
                raise UserError([Problem("optimizer", expected, f"{self._job.optimizer!r}: {found}", hint)])


def _held(tensor: Tensor | None) -> str:
    return "none" if tensor is None else hash_tensors([("", tensor)])[:_MARK_DIGITS]


def _same(one: Tensor, other: Tensor) -> bool:
    return hash_tensors([("", one)]) == hash_tensors([("", other)])


def _attributes(instance: ClassOptimizer) -> dict[str, str]:
    """Returns the attributes that torch's base class does not have, as texts."""
    base = vars(torch.optim.SGD([torch.zeros(1, device="cpu")]))
    return {name: _text(each) for name, each in vars(instance.made).items() if name not in base}


def _text(value: object) -> str:
    """Returns a text of a tensor, a number or a text, and of those in a container; empty for other objects."""
    if isinstance(value, Tensor):
        return hash_tensors([("", value)])
    if isinstance(value, (list, tuple)):
        return ",".join(_text(each) for each in value if not isinstance(each, Tensor))
    if isinstance(value, dict):
        return ",".join(f"{_text(key)}:{_text(each)}" for key, each in value.items() if not isinstance(each, Tensor))
    return repr(value) if isinstance(value, (bool, int, float, str)) else ""


def _changed(instance: ClassOptimizer, before: Mapping[str, str]) -> str:
    now = _attributes(instance)
    return next((name for name in now if before.get(name) != now[name]), "")
