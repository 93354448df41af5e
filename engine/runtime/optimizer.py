"""Optimizers: one instance per layer, so that a layer moves with its state, and one arithmetic path everywhere.

Fused and foreach paths differ in bits from the plain one; owner and replica must never take different ones.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn

from engine.core.errors import Problem, UserError, nearest
from engine.core.job import Job

_CLASSES = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
_FIXED = ("params", "lr", "foreach", "fused", "capturable", "differentiable")


def make_optimizer(job: Job, layer: nn.Module) -> torch.optim.Optimizer | None:
    """Returns the optimizer of one layer, or None if it has no parameters; raises UserError for unknown arguments."""
    parameters = list(layer.parameters())
    if not parameters:
        return None
    known = [name for name in inspect.signature(_CLASSES[job.optimizer]).parameters if name not in _FIXED]
    problems = [
        Problem(f"optimizer_args.{name}", f"one of {', '.join(known)}", repr(name), nearest(name, known))
        for name in job.optimizer_args
        if name not in known
    ]
    if problems:
        raise UserError(problems)
    try:
        return _CLASSES[job.optimizer](parameters, lr=job.lr, foreach=False, fused=False, **job.optimizer_args)
    except (TypeError, ValueError) as error:
        raise UserError([Problem("optimizer_args", f"what {job.optimizer} takes", str(error))]) from error


def state_tensors(layer: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterable[tuple[str, torch.Tensor]]:
    """Yields the layer's weights, then its optimizer state, each with its name, in the order of the parameters."""
    yield from layer.named_parameters()
    if optimizer is None:
        return
    for name, parameter in layer.named_parameters():
        for key, value in sorted(optimizer.state[parameter].items()):
            if isinstance(value, torch.Tensor):
                yield f"{name}.{key}", value
