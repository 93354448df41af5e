"""Optimizers: one per layer, so that a layer moves with its state, and one path of arithmetic everywhere.

The arithmetic is torch's own, through its functional form: fused and foreach paths differ in bits from the plain one,
and owner and replica must never take different ones. The optimizer classes are not used because the first call of one
imports torch's compiler, which costs every start 0.8 s; and so the state is a plain mapping, ready to be sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from engine.core.config.job import Job
from engine.core.errors import Problem, UserError
from engine.models.arguments import check_builtin_args
from engine.runtime.stage.tensor_shards import as_shard_of

Named = dict[str, Tensor]
Rule = Callable[[Tensor, Tensor, Named, float], None]  # (weights, gradient, their state, learning rate)


def trainable(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns the parameters of a layer that are trained, with their names; frozen ones are left alone."""
    return [(name, parameter) for name, parameter in layer.named_parameters() if parameter.requires_grad]


class LayerOptimizer:
    """The optimizer of one layer; `state` maps a parameter's name to its named state tensors, none at first."""

    def __init__(self, job: Job, layer: nn.Module):
        check_builtin_args("optimizer_args", OPTIMIZERS[job.optimizer], job.optimizer_args)
        self.layer = layer
        self.rule: Rule = OPTIMIZERS[job.optimizer](**job.optimizer_args)
        self.state: dict[str, Named] = {name: {} for name, _ in trainable(layer)}

    def step(self, learning_rate: float, gradients: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Updates every trained parameter from its gradient by name, times `factor`; the gradients stay as they are."""
        with torch.no_grad():
            for name, parameter in trainable(self.layer):
                gradient = as_shard_of(parameter, gradients[name])
                gradient = gradient if factor == 1.0 else gradient * factor
                self.rule(parameter, gradient, self.state[name], learning_rate)

    def state_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields the layer's weights, then its optimizer state, each with its name, in the order of the parameters."""
        yield from self.layer.named_parameters()
        for name, tensors in self.state.items():
            for key, tensor in sorted(tensors.items()):
                yield f"{name}.{key}", tensor


def adamw(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> Rule:
    """AdamW (Loshchilov and Hutter, Decoupled Weight Decay Regularization, ICLR 2019, algorithm 2)."""

    def rule(weights: Tensor, gradient: Tensor, state: Named, learning_rate: float) -> None:
        if not state:
            state |= {"step": torch.tensor(0.0), "exp_avg": weights.new_zeros(weights.shape)}
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


def sgd(*, momentum: float = 0.0, dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False) -> Rule:
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


OPTIMIZERS: dict[str, Callable[..., Rule]] = {"adamw": adamw, "sgd": sgd}
