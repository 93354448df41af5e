"""Optimizers: one per layer, so that a layer's optimizer state can be sent with the layer.

adamw and sgd use torch's functional form without `foreach` and `fused`, whose bits differ: owner and shadow must take
the same code path. All others go by their class (`engine/runtime/stage/class_optimizer.py`), whose first use imports
torch's compiler, 0.8 s. The state is a plain mapping.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer, lr_scheduler
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from engine.core.errors import InvariantError, Problem, UserError
from engine.core.job.job import FACTORY, Job
from engine.core.job.torch_parts import (
    PLATEAU,
    SCHEDULES,
    LossScale,
    given_arguments,
    learning_rate,
    loss_scaling,
    plain_argument,
    warming_up,
)
from engine.core.job.update_rules import MONITOR, ParamGroup
from engine.core.manifest import AVERAGE
from engine.core.units import Args
from engine.models.arguments import check_builtin_args, check_user_args
from engine.models.layers import Model
from engine.models.user_code import running
from engine.models.user_factory import import_factory
from engine.runtime.device.missing_gradients import is_missing
from engine.runtime.stage.class_optimizer import ClassOptimizer, Named, OptimizerClass, groups_by_layer
from engine.runtime.stage.state_hash import WHOLE, Shard

# The learning rate is a function of the step alone, so any worker knows the rate of any step. If a job names a figure
# to monitor, its last value comes with the commit. The coordinator knows the rate on a plateau, which comes likewise.
#
# A schedule of torch's is stepped along with a dummy parameter, and all rates are kept. So a worker that heals, resumes
# or repeats a step gets torch's own bits. After the warm-up, a schedule counts from 0.


LearningRate = Callable[..., float]  # of the step, 0-based; and of the monitored figure, if the job names one
_MOST_TRIED = 1000
_NEVER = (lr_scheduler.ReduceLROnPlateau, lr_scheduler.SequentialLR, lr_scheduler.ChainedScheduler)


def learning_rates(job: Job) -> LearningRate:
    """Returns the rate of each step; raises UserError for user code that is not a schedule."""
    if job.lr_schedule == PLATEAU:
        return _told
    if (part := SCHEDULES.get(job.lr_schedule)) is not None:
        kwargs = given_arguments(part.arguments, job.lr_args)
        if part.horizon:
            kwargs.setdefault(part.horizon, max(1, job.steps - job.warmup_steps))
        if part.peak:
            kwargs[part.peak] = job.lr
        kind = getattr(lr_scheduler, part.cls)
        if "cycle_momentum" in inspect.signature(kind).parameters:
            kwargs["cycle_momentum"] = False
        return _warmed(job, _StepResult(job, kind, kwargs))
    if FACTORY.fullmatch(job.lr_schedule):
        return _warmed(job, _own(job))
    peak, steps, warmup = job.lr, job.steps, job.warmup_steps
    return lambda step: learning_rate(job.lr_schedule, peak, step, steps, warmup)


def check_rates(job: Job) -> None:
    """Tries the first rates of a user's schedule; raises UserError if one is invalid, or differs the second time."""
    if not FACTORY.fullmatch(job.lr_schedule):
        return
    first, second = (learning_rates(job) for _ in range(2))
    if MONITOR in job.lr_args:
        first(job.warmup_steps, None)  # before the first validation
        first, second = (partial(_at, rate) for rate in (first, second))
    steps = range(job.warmup_steps, min(job.steps, job.warmup_steps + _MOST_TRIED))
    rates = {step: first(step) for step in steps}
    for step in reversed(steps):
        if second(step) != rates[step]:
            hint = f"step {step} has the rate {rates[step]!r}, and {second(step)!r} where steps are asked for backwards"
            raise UserError([Problem("lr_schedule", "a function of the step alone", repr(job.lr_schedule), hint)])


def _at(rate: LearningRate, step: int) -> float:
    return rate(step, 1.0)


def _told(step: int) -> float:
    raise InvariantError(f"the commit of step {step} has no rate")


def _warmed(job: Job, rate_of: LearningRate) -> LearningRate:
    def rate(step: int, *monitored: float | None) -> float:
        if step < job.warmup_steps:
            return warming_up(job.lr, step, job.warmup_steps)
        return rate_of(step - job.warmup_steps, *monitored)

    return rate


class _StepResult:
    """The rates of a scheduler, which is stepped on demand."""

    def __init__(self, job: Job, kind: Callable[..., lr_scheduler.LRScheduler], kwargs: Mapping[str, Any]):
        self._name = job.lr_schedule
        self._optimizer = _Untrained(job.lr)
        try:
            self._scheduler = kind(self._optimizer, **kwargs)
        except (ValueError, TypeError, ZeroDivisionError) as error:
            args = ", ".join(f"{name}={value}" for name, value in job.lr_args.items()) or "none"
            raise UserError([Problem("lr_args", "arguments that the schedule takes", args, str(error))]) from error
        self._optimizer.step()  # else the scheduler warns
        self._rates = [self._now()]

    def __call__(self, step: int) -> float:
        while len(self._rates) <= step:
            self._scheduler.step()
            self._rates.append(self._now())
        return self._rates[step]

    def _now(self) -> float:
        return _checked(self._name, float(self._optimizer.param_groups[0]["lr"]))


class _Untrained(Optimizer):
    """An optimizer of a dummy parameter, whose constructor does not import torch's compiler."""

    def __init__(self, rate: float) -> None:
        self.param_groups = [{"params": [torch.zeros((), device="cpu")], "lr": rate}]
        self.defaults: dict[str, Any] = {"lr": rate}

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Changes nothing."""


def _own(job: Job) -> LearningRate:
    """Returns the rates of a class of schedulers, or of a function of the step that returns a factor."""
    named: Any = import_factory("lr_schedule", job.lr_schedule)
    args = {name: plain_argument(value) for name, value in job.lr_args.items()}
    if isinstance(named, type) and issubclass(named, lr_scheduler.LRScheduler):
        if issubclass(named, _NEVER):
            hint = "name plateau for ReduceLROnPlateau; a class that takes other schedules needs more than the step"
            raise UserError([Problem("lr_schedule", "a schedule of the step alone", repr(job.lr_schedule), hint)])
        check_user_args("lr_args", partial(named, _Untrained(job.lr)), job.lr_args)
        return _StepResult(job, named, args)
    is_led = args.pop(MONITOR, None) is not None
    extra: Args = {"monitored": 0.0} if is_led else {}
    check_user_args("lr_args", partial(named, 0), {name: job.lr_args[name] for name in args} | extra)

    def rate(step: int, *monitored: float | None) -> float:
        with running(f"the schedule {job.lr_schedule}", named):
            factor = named(step, **args, monitored=monitored[0]) if is_led else named(step, **args)
            if isinstance(factor, bool) or not isinstance(factor, (int, float)):
                raise TypeError(f"expected a number, the factor of lr in step {step}, found {type(factor).__name__}")
        return _checked(job.lr_schedule, job.lr * factor)

    return rate


def _checked(name: str, rate: float) -> float:
    if not (math.isfinite(rate) and rate >= 0):
        hint = f"it gives a rate of {rate}"
        raise UserError([Problem("lr_schedule", "finite rates of at least 0", repr(name), hint)])
    return rate


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

    In float16 the state includes the scale of the loss, so every replica, heal and checkpoint of any layer has it.

    `groups` has the parameter group of each parameter that is in one. `kept` has the weights of the layer that are
    updated here: its parameters, or with FSDP a shard of each. The optimizer state has the same shapes.
    """

    def __init__(self, job: Job, layer: nn.Module, groups: Mapping[str, ParamGroup] = NO_GROUPS):
        self.kept: dict[str, Tensor] = dict(layer.named_parameters())
        self.shard = WHOLE
        self._whole = self.kept
        self.groups = groups
        self._decay = job.ema
        self._arithmetic = _Arithmetic(job, groups)
        self._instance: ClassOptimizer | None = None
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
        return {name: weight for name, weight in self.kept.items() if weight.requires_grad}

    def step(self, learning_rate: float, gradients: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Updates each trained parameter from `gradients[name] * factor`; the gradients do not change.

        As in torch, a parameter with a missing gradient stays as it is, and so does its state. A factor of 0 skips the
        step. The scale of the loss is updated after each step, and so is the average of the weights, which starts with
        those of the first step (`torch.optim.swa_utils`).
        """
        # An optimizer must not see the averages: some initialize their state only if it is empty.
        averages = {name: self.state[name].pop(AVERAGE, None) for name in self.trained()} if self._decay else {}
        self._update(learning_rate, gradients, factor)
        with torch.no_grad():
            for name, average in averages.items():
                weight = self.kept[name].detach()
                new = weight.clone() if average is None else average.lerp_(weight, 1 - self._decay)
                self.state[name][AVERAGE] = new

    def _update(self, learning_rate: float, gradients: Mapping[str, Tensor], factor: float) -> None:
        if self._scaling is not None:
            self.state[LOSS_SCALE] = _as_tensors(self._scaling.after(self._scale(), is_skipped=factor == 0))
            if factor == 0:
                return
        names = [name for name in self.trained() if not is_missing(gradients[name])]
        own = {name: self.shard.of(gradients[name]) for name in names}
        if self._arithmetic.cls is None:
            with torch.no_grad():
                for name, gradient in own.items():
                    rule = self._arithmetic.rules[self.groups[name].pattern if name in self.groups else ""]
                    scaled = gradient if factor == 1.0 else gradient * factor
                    rule(self.kept[name], scaled, self.state[name], self._rate(name, learning_rate))
        elif trained := self.trained():
            with torch.no_grad():
                # A product is a copy: the optimizer may write to its gradients, which other replicas share.
                copies = {name: gradient * factor for name, gradient in own.items()}
            rates = {name: self._rate(name, learning_rate) for name in trained}
            self._instance_of(self._arithmetic.cls).step(copies, rates, self.state)

    @property
    def loss_scale(self) -> float:
        """The scale of the loss in the open step; 1 unless the dtype is float16."""
        return 1.0 if self._scaling is None else self._scale().scale

    def _scale(self) -> LossScale:
        scale = self.state[LOSS_SCALE]
        return LossScale(scale["scale"].item(), int(scale["good_steps"].item()))

    def prepare(self) -> None:
        """Instantiates a class and its initial state; raises UserError if the class refuses its arguments."""
        if self._arithmetic.cls is not None and self.trained():
            self._instance_of(self._arithmetic.cls).fill(self.state)

    def _instance_of(self, cls: OptimizerClass) -> ClassOptimizer:
        if self._instance is None:
            of_groups = {name: group.args for name, group in self.groups.items()}
            self._instance = cls.instance(list(self.trained().items()), of_groups)
        return self._instance

    def _rate(self, name: str, learning_rate: float) -> float:
        return learning_rate * self.groups[name].lr if name in self.groups else learning_rate

    def state_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields (name, tensor) of the layer's weights, then of its optimizer state, in the order of the parameters."""
        yield from self.kept.items()
        for name, tensors in self.state.items():
            for key, tensor in sorted(tensors.items()):
                yield f"{name}.{key}", tensor

    def whole_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the same, but with uninitialized memory for the whole of each tensor of which a shard is here."""
        yield from ((name, weight.new_empty(self._whole[name].shape)) for name, weight in self.kept.items())
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


class _Arithmetic:
    """The class of a job's optimizer, or its rules by the pattern of the group, which is "" without one."""

    def __init__(self, job: Job, groups: Mapping[str, ParamGroup]):
        self.rules: dict[str, UpdateRule] = {}
        self.cls: OptimizerClass | None = None
        if job.optimizer not in OPTIMIZERS:
            self.cls = OptimizerClass(job)
            return
        make = OPTIMIZERS[job.optimizer]
        check_builtin_args("optimizer_args", make, job.optimizer_args)
        self.rules[""] = make(**job.optimizer_args)
        for group in {group.pattern: group for group in groups.values()}.values():
            check_builtin_args("param_groups", make, group.args)
            self.rules[group.pattern] = make(**{**job.optimizer_args, **group.args})


OPTIMIZERS: dict[str, Callable[..., UpdateRule]] = {"adamw": adamw, "sgd": sgd}
