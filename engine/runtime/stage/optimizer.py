"""Optimizers: one per layer, so that a layer's optimizer state can be sent with the layer.

The arithmetic of adamw and sgd is torch's functional form without `foreach` and `fused`, which differ in bits: owner
and shadow must take the same path. All others go by their class (`engine/runtime/optimizers/class_optimizer.py`), whose
first use imports torch's compiler, 0.8 s. The state is a plain mapping.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from engine.core.config.job import Job
from engine.core.config.loss_scaling import LossScale, loss_scaling
from engine.core.config.param_groups import ParamGroup
from engine.core.errors import Problem, UserError
from engine.models.arguments import check_builtin_args
from engine.models.layers import Model
from engine.runtime.device.missing_gradients import is_missing
from engine.runtime.optimizers.class_optimizer import ClassOptimizer, Named, OptimizerClass
from engine.runtime.optimizers.layer_groups import groups_by_layer
from engine.runtime.stage.tensor_shards import WHOLE, Shard

LOSS_SCALE = "(loss scale)"  # in the place of a parameter's name
NO_GROUPS: Mapping[str, ParamGroup] = MappingProxyType({})
UpdateRule = Callable[[Tensor, Tensor, Named, float], None]  # (weights, gradient, their state, learning rate)


def trainable(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, parameter) of a layer's parameters that require a gradient."""
    return [(name, parameter) for name, parameter in layer.named_parameters() if parameter.requires_grad]


def _as_tensors(scale: LossScale) -> Named:
    return {
        "scale": torch.tensor(scale.scale, device="cpu"),
        "good_steps": torch.tensor(scale.good_steps, device="cpu"),
    }


class LayerOptimizer:
    """The optimizer of one layer; `state` maps a parameter's name to its named state tensors, initially none.

    In float16 it has the scale of the loss too, so that each replica, heal and checkpoint of any layer has it.

    `groups` has the parameter group of each parameter that is in one. `kept` has the weights of the layer that are
    updated here: its parameters, or with FSDP a shard of each. The optimizer state has their form.
    """

    def __init__(self, job: Job, layer: nn.Module, groups: Mapping[str, ParamGroup] = NO_GROUPS):
        self.kept: dict[str, Tensor] = dict(layer.named_parameters())
        self.shard = WHOLE
        self._whole = self.kept
        self.groups = groups
        self._chosen = _Chosen(job, {each.pattern: each for each in groups.values()})
        self._made: ClassOptimizer | None = None
        self.state: dict[str, Named] = {name: {} for name in self.trained()}
        self._scaling = loss_scaling(job)
        if self._scaling is not None:
            self.state[LOSS_SCALE] = _as_tensors(self._scaling.first())

    def keep(self, shard: Shard) -> None:
        """Keeps copies of a shard of the weights, before the first step."""
        self.shard = shard
        self.kept = {
            name: shard.of(whole.detach()).clone().requires_grad_(whole.requires_grad)
            for name, whole in self._whole.items()
        }

    def trained(self) -> dict[str, Tensor]:
        """Returns the weights that are updated here and require a gradient, by name."""
        return {name: kept for name, kept in self.kept.items() if kept.requires_grad}

    def step(self, learning_rate: float, gradients: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Updates each trained parameter from `gradients[name] * factor`; the gradients are not changed.

        A parameter whose gradient is missing stays as it is, with its state, as in torch. A factor of 0 skips the step.
        The scale of the loss is updated after each step.
        """
        if self._scaling is not None:
            self.state[LOSS_SCALE] = _as_tensors(self._scaling.after(self._scale(), is_skipped=factor == 0))
            if factor == 0:
                return
        names = [name for name in self.trained() if not is_missing(gradients[name])]
        given = {name: self.shard.of(gradients[name]) for name in names}
        if self._chosen.own is not None:
            self._step_by_class(self._chosen.own, learning_rate, given, factor)
            return
        with torch.no_grad():
            for name, gradient in given.items():
                rule = self._chosen.rules[self._pattern(name)]
                scaled = gradient if factor == 1.0 else gradient * factor
                rule(self.kept[name], scaled, self.state[name], self._rate(name, learning_rate))

    def _step_by_class(
        self, own: OptimizerClass, learning_rate: float, gradients: Mapping[str, Tensor], factor: float
    ) -> None:
        if not (names := self.trained()):
            return
        with torch.no_grad():
            # A product is a copy: the optimizer may write to its gradients, which other replicas share.
            given = {name: gradient * factor for name, gradient in gradients.items()}
        self._instance(own).step(given, {name: self._rate(name, learning_rate) for name in names}, self.state)

    @property
    def loss_scale(self) -> float:
        """The scale of the loss in the open step; 1 in other dtypes than float16."""
        return 1.0 if self._scaling is None else self._scale().scale

    def _scale(self) -> LossScale:
        kept = self.state[LOSS_SCALE]
        return LossScale(kept["scale"].item(), int(kept["good_steps"].item()))

    def prepare(self) -> None:
        """Makes the instance of a class, and its first state; raises UserError if the class refuses its arguments."""
        if self._chosen.own is not None and self.trained():
            self._instance(self._chosen.own).fill(self.state)

    def _instance(self, own: OptimizerClass) -> ClassOptimizer:
        if self._made is None:
            self._made = own.made(list(self.trained().items()), {name: each.args for name, each in self.groups.items()})
        return self._made

    def _pattern(self, name: str) -> str:
        return self.groups[name].pattern if name in self.groups else ""

    def _rate(self, name: str, learning_rate: float) -> float:
        return learning_rate * self.groups[name].lr if name in self.groups else learning_rate

    def state_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields (name, tensor) of the layer's weights, then of its optimizer state, in the order of the parameters."""
        yield from self.kept.items()
        for name, tensors in self.state.items():
            for key, tensor in sorted(tensors.items()):
                yield f"{name}.{key}", tensor

    def whole_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the same, with memory for the whole of each tensor of which a shard is here."""
        yield from ((name, kept.new_empty(self._whole[name].shape)) for name, kept in self.kept.items())
        for name, tensors in self.state.items():
            for key, tensor in sorted(tensors.items()):
                is_cut = name in self.kept and tensor.dim() > 0 and tensor.shape == self.kept[name].shape
                yield f"{name}.{key}", tensor.new_empty(self._whole[name].shape) if is_cut else tensor


def layer_optimizers(job: Job, model: Model, layers: Mapping[int, nn.Module]) -> dict[int, LayerOptimizer]:
    """Returns the optimizer of each of these layers of a model."""
    groups = groups_by_layer(job, model, layers)
    return {index: LayerOptimizer(job, layer, groups[index]) for index, layer in layers.items()}


def adamw(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> UpdateRule:
    """AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2)."""

    def rule(weights: Tensor, gradient: Tensor, state: Named, learning_rate: float) -> None:
        if not state:
            state |= {"step": torch.tensor(0.0, device="cpu"), "exp_avg": weights.new_zeros(weights.shape)}
            state["exp_avg_sq"] = weights.new_zeros(weights.shape)
        torch_adamw(
            [weights],
            [gradient],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [],
            [state["step"]],
            foreach=False,
            fused=False,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=learning_rate,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
        )

    return rule


def sgd(
    *, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False
) -> UpdateRule:
    """Stochastic gradient descent with momentum, as torch.optim.SGD defines it."""
    if nesterov and (momentum == 0 or dampening != 0):
        raise UserError([Problem("optimizer_args.nesterov", "momentum above 0 and no dampening with it", "True")])

    def rule(weights: Tensor, gradient: Tensor, state: Named, learning_rate: float) -> None:
        buffers = [state.get("momentum_buffer")]
        torch_sgd(
            [weights],
            [gradient],
            buffers,
            foreach=False,
            fused=False,
            weight_decay=weight_decay,
            momentum=momentum,
            lr=learning_rate,
            dampening=dampening,
            nesterov=nesterov,
            maximize=False,
        )
        if buffers[0] is not None:
            state["momentum_buffer"] = buffers[0]

    return rule


class _Chosen:
    """The rules of a job by the pattern of the group, empty without one; or the class of its optimizer."""

    def __init__(self, job: Job, groups: Mapping[str, ParamGroup]):
        self.rules: dict[str, UpdateRule] = {}
        self.own: OptimizerClass | None = None
        if job.optimizer not in OPTIMIZERS:
            self.own = OptimizerClass(job)
            return
        make = OPTIMIZERS[job.optimizer]
        check_builtin_args("optimizer_args", make, job.optimizer_args)
        self.rules[""] = make(**job.optimizer_args)
        for each in groups.values():
            check_builtin_args("param_groups", make, each.args)
            self.rules[each.pattern] = make(**{**job.optimizer_args, **each.args})


OPTIMIZERS: dict[str, Callable[..., UpdateRule]] = {"adamw": adamw, "sgd": sgd}
