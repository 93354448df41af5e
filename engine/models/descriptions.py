"""One line about each built-in model and data source; without torch, so that a list of them comes at once.

Rule: `tests/runtime/test_data.py` holds the samples in these lines against those that the sources yield.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.models.data import Task

_RESIDUAL = "residual network with {} weight layers, for images"
MODEL_TEXTS: dict[str, str] = {
    "gpt": "transformer that predicts the next byte of a text",
    "gpt-100m": "the same with 100 million parameters, in bfloat16, with fused attention",
    "gpt-1b": "the same with a thousand million parameters",
    "bert": "transformer that predicts hidden bytes of a text",
    **{f"resnet{layers}": _RESIDUAL.format(layers) for layers in (18, 34, 50, 101, 152)},
    "vgg19": "convolutional network of 19 weight layers, for images",
    "alexnet": "convolutional network of 8 weight layers, for images",
    "mlp": "fully connected layers, for vectors or flattened images",
    "timed": "layers that sleep instead of computing: a stand-in for an accelerator",
}
DATA_TEXTS: dict[str, str] = {
    "text": "the documentation that ships with Python, as bytes",
    "digits": "scikit-learn's 1797 handwritten digits, gray values from 0 to 1",
    "synthetic": "random data that can be learned, made from the seed",
}
# source -> task -> one sample with the default arguments
SAMPLES: dict[str, Mapping[Task, str]] = {
    "text": {"causal": "int64 32, below 256", "masked": "int64 32, below 257"},
    "digits": {"classify": "float32 1x8x8, 10 classes"},
    "synthetic": {
        "regress": "float32 32, target float32 1",
        "classify": "float32 3x32x32, 10 classes",
        "causal": "int64 32, below 256",
        "masked": "int64 32, below 257",
    },
}
