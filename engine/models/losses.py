"""The losses that a job can name, the metric of the built-in models, and the call of a model's loss and metrics.

They are pure functions of (outputs, targets), means over the microbatch.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.models.layers import Loss, Model, Tensors
from engine.models.user_code import RAISED, blame

_LOSS = "the loss"
_NARROW = (torch.bfloat16, torch.float16)
IGNORED = -100  # the target of a position that does not count; torch's own value


def default_loss(outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the cross-entropy over the last dimension in nats, or the mean square for float targets, in float32."""
    output, target = outputs[0].float(), targets[0]
    if target.is_floating_point():
        return (output - target).square().mean()
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED)


# Losses by name: the first output, in float32, is compared with the first target. Arguments follow the asterisk.


def cross_entropy(outputs: Tensors, targets: Tensors, *, label_smoothing: float = 0.0) -> Tensor:
    """Returns the cross-entropy over the last dimension in nats, as torch defines it; targets are classes."""
    output, target = outputs[0].float().flatten(0, -2), targets[0].flatten()
    return F.cross_entropy(output, target, ignore_index=IGNORED, label_smoothing=label_smoothing)


def mse(outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the mean square error."""
    return F.mse_loss(outputs[0].float(), targets[0])


def l1(outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the mean absolute error."""
    return F.l1_loss(outputs[0].float(), targets[0])


def smooth_l1(outputs: Tensors, targets: Tensors, *, beta: float = 1.0) -> Tensor:
    """Returns the mean absolute error, quadratic below `beta`."""
    return F.smooth_l1_loss(outputs[0].float(), targets[0], beta=beta)


def huber(outputs: Tensors, targets: Tensors, *, delta: float = 1.0) -> Tensor:
    """Returns the mean square error, linear above `delta`, which is above 0."""
    return F.huber_loss(outputs[0].float(), targets[0], delta=delta)


def bce_with_logits(outputs: Tensors, targets: Tensors, *, pos_weight: float = 1.0) -> Tensor:
    """Returns the binary cross-entropy of logits with targets in 0..1; `pos_weight` multiplies that of positives."""
    output = outputs[0].float()
    weight = output.new_tensor(pos_weight)
    return F.binary_cross_entropy_with_logits(output, targets[0].to(output.dtype), pos_weight=weight)


def _is_of_classes(loss: Loss) -> bool:
    return getattr(loss, "func", loss) in (default_loss, cross_entropy)  # a partial has arguments of the job


def num_counted(targets: Tensors, *, is_shifted: bool = False) -> int:
    """Returns how many of the targets count in the loss; if it `is_shifted`, all but the first of each row may."""
    target = targets[0][..., 1:] if is_shifted else targets[0]
    return target.numel() if target.is_floating_point() else int((target != IGNORED).sum())


def accuracy(outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the fraction of targets that count, in 0..1, whose class has the largest output."""
    counted = targets[0] != IGNORED
    return (outputs[0].argmax(dim=-1) == targets[0])[counted].float().mean()


METRICS: Mapping[str, Loss] = {"accuracy": accuracy}


def loss_of(model: Model, outputs: Tensors, targets: Tensors) -> Tensor:
    """Returns the loss of a microbatch; an exception in it names the loss, and what the loss was called with."""
    return _called(_LOSS, model.loss, outputs[: model.num_loss_outputs or None], targets)


def metrics_of(model: Model, outputs: Tensors, targets: Tensors) -> dict[str, float]:
    """Returns a microbatch's metrics by name, with the accuracy for classes; an exception names its metric."""
    outputs = outputs[model.num_loss_outputs :]
    has_classes = _is_of_classes(model.loss) and not targets[0].is_floating_point()
    usual = model.metric or (accuracy if has_classes else None)
    metrics = model.metrics if usual is None else {_name_of(usual): usual, **model.metrics}
    return {name: float(_called(f"the metric {name}", each, outputs, targets)) for name, each in metrics.items()}


def _name_of(metric: Loss) -> str:
    name = getattr(metric, "__name__", "")
    return name if name.isidentifier() else "metric"


def _called(place: str, function: Loss, outputs: Tensors, targets: Tensors) -> Tensor:
    outputs = tuple(each.float() if each.dtype in _NARROW else each for each in outputs)
    try:
        value = function(outputs, targets)
        if isinstance(value, float | int) and place != _LOSS:
            value = torch.tensor(float(value), device=outputs[0].device)
        if not isinstance(value, Tensor) or value.numel() != 1:
            kind = shapes_of((value,)) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"expected a tensor with one number, the mean over the microbatch, found {kind}")
    except RAISED as error:
        blame(error, place, function, _hint(error, outputs, targets, _is_of_classes(function)))
        raise
    return value


def _hint(error: BaseException, outputs: Tensors, targets: Tensors, is_default: bool) -> str:
    """Returns the values that torch's own words lack: the wrong class, or the shapes."""
    output, target = outputs[0], targets[0] if targets else outputs[0]
    has_classes = output.dim() == 2 or (is_default and output.dim() > 2)
    if isinstance(error, IndexError) and has_classes and not target.is_floating_point() and target.numel():
        counted = target[target != IGNORED]
        wrong = [each for each in counted.flatten().tolist() if not 0 <= each < output.shape[-1]]
        if wrong:
            expected = f"targets from 0 to {output.shape[-1] - 1}, or a last layer with one output for each class"
            return f"{output.shape[-1]} classes, target {wrong[0]}; expected {expected}"
    shapes = f"outputs {shapes_of(outputs)}, targets {shapes_of(targets)}"
    return f"{shapes}; both are tuples: take outputs[0] and targets[0]" if isinstance(error, TypeError) else shapes


def shapes_of(tensors: Tensors) -> str:
    """Returns the dtypes and shapes of tensors, such as ``float32 [4, 10]``."""
    return " and ".join(f"{str(each.dtype).removeprefix('torch.')} {list(each.shape)}" for each in tensors) or "none"
