"""The gradient with which the backward of a microbatch begins: its share of the loss of the step, times the scale."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.core.config.loss_scaling import LEAST_SCALE
from engine.core.errors import DivergedError
from engine.runtime.device.missing_gradients import marked


class LossShare:
    """The share of one of some microbatches: the loss of a step is their mean. A tensor is made once for each scale."""

    def __init__(self, microbatches: int):
        self._microbatches = microbatches
        self._made: Tensor | None = None
        self._scale = 0.0

    def of(self, loss: Tensor, scale: float) -> Tensor:
        """Returns the gradient of a microbatch's loss.

        Raises:
            DivergedError: the scale has become smaller than any that could help.
        """
        if self._made is None or scale != self._scale:
            if scale < LEAST_SCALE:
                raise DivergedError(f"the gradients are not finite, down to a scale of the loss of {scale}")
            share = (torch.ones_like(loss) * scale) / self._microbatches
            self._made, self._scale = marked(share, is_missing=False), scale
        return self._made
