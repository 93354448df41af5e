"""The smallest model: fully connected layers, for vectors (regression) and for flattened images (classes)."""

from __future__ import annotations

from functools import partial

from torch import nn

from engine.models.data import DataFacts
from engine.models.layers import LayerSpec, Model
from engine.models.losses import default_loss


class Hidden(nn.Sequential):
    """A linear map of the flattened input, a GELU and dropout: [size, ...] to [size, width]."""

    def __init__(self, num_inputs: int, width: int, dropout: float):
        super().__init__(nn.Flatten(), nn.Linear(num_inputs, width), nn.GELU(), nn.Dropout(dropout))


def mlp(facts: DataFacts, *, width: int = 64, depth: int = 3, dropout: float = 0.0) -> Model:
    """Returns a model of `depth` hidden layers and a linear head."""
    classifies = facts.task == "classify"
    num_inputs = facts.channels * facts.height * facts.width if classifies else facts.features
    num_outputs = facts.num_classes if classifies else facts.outputs
    hidden = [
        LayerSpec(f"hidden{index}", "Hidden", partial(Hidden, width if index else num_inputs, width, dropout))
        for index in range(depth)
    ]
    head = LayerSpec("head", "Linear", partial(nn.Linear, width, num_outputs))
    return Model((*hidden, head), default_loss)
