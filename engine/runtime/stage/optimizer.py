"""Optimizers: one per layer, so that a layer's optimizer state can be sent with the layer.

The arithmetic is torch's functional form without `foreach` and `fused`, which differ in bits: owner and shadow must
take the same path. The optimizer classes are not used because their first call imports torch's compiler, 0.8 s at every
start. The state is a plain mapping.
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
UpdateRule = Callable[[Tensor, Tensor, Named, float], None]  # (weights, gradient, their state, learning rate)


def trainable(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns (name, parameter) of a layer's parameters that require a gradient."""
    return [(name, parameter) for name, parameter in layer.named_parameters() if parameter.requires_grad]


class LayerOptimizer:
    """The optimizer of one layer; `state` maps a parameter's name to its named state tensors, initially none."""

    def __init__(self, job: Job, layer: nn.Module):
        check_builtin_args("optimizer_args", OPTIMIZERS[job.optimizer], job.optimizer_args)
        self.layer = layer
        self.rule: UpdateRule = OPTIMIZERS[job.optimizer](**job.optimizer_args)
        self.state: dict[str, Named] = {name: {} for name, _ in trainable(layer)}

    def step(self, learning_rate: float, gradients: Mapping[str, Tensor], factor: float = 1.0) -> None:
        """Updates each trained parameter from `gradients[name] * factor`; the gradients are not changed."""
        with torch.no_grad():
            for name, parameter in trainable(self.layer):
                gradient = as_shard_of(parameter, gradients[name])
                gradient = gradient if factor == 1.0 else gradient * factor
                self.rule(parameter, gradient, self.state[name], learning_rate)

    def state_tensors(self) -> Iterable[tuple[str, Tensor]]:
        """Yields (name, tensor) of the layer's weights, then of its optimizer state, in the order of the parameters."""
        yield from self.layer.named_parameters()
        for name, tensors in self.state.items():
            for key, tensor in sorted(tensors.items()):
                yield f"{name}.{key}", tensor


def adamw(*, beta1: float = 0.9, beta2: float = 0.999, eps: float = 1e-8, weight_decay: float = 0.01) -> UpdateRule:
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


OPTIMIZERS: dict[str, Callable[..., UpdateRule]] = {"adamw": adamw, "sgd": sgd}
