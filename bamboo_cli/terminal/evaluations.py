"""The results of a validation pass in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def evaluation_words(sets: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the loss and the metrics of each evaluation set, one text for each set; of an only set, one for each."""
    if len(sets) == 1:
        return [_loss(sets[0]), *_metrics(sets[0])]
    return [_loss(each) + (f" ({', '.join(metrics)})" if (metrics := _metrics(each)) else "") for each in sets]


def _loss(found: Mapping[str, Any]) -> str:
    return f"{found['name']} {found['loss']:.4f}"


def _metrics(found: Mapping[str, Any]) -> list[str]:
    return [
        f"{name} {value:.1%}" if name == "accuracy" else f"{name} {value:.4f}"
        for name, value in found["metrics"].items()
    ]
