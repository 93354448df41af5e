"""The facts of a data set, as far as its first microbatch tells them; a size that it does not tell is 0."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.models.data import Columns, DataFacts
from engine.models.layers import Batch


def seen_facts(batch: Batch, form: Columns | None, training: Any) -> DataFacts:
    """Returns the facts of a microbatch of a training set.

    Float targets are values to regress. Whole-number targets are the next tokens if they have the shape of the inputs,
    else classes; their number comes from `classes` or `features` of the set, as torchvision's and datasets' sets have.
    """
    inputs = batch.inputs[0]
    if form is not None:
        inputs = next(
            (each for name, each in zip(form.names, batch.inputs, strict=True) if name != form.target), inputs
        )
    target = batch.targets[0]
    features = inputs.shape[1] if inputs.dim() == 2 else 0
    if target.is_floating_point():
        return DataFacts(task="regress", features=features, outputs=target[0].numel(), form=form)
    if target.shape == inputs.shape and not inputs.is_floating_point():
        return DataFacts(task="causal", sequence=features, form=form)
    channels, height, width = inputs.shape[1:] if inputs.dim() == 4 else (0, 0, 0)
    return DataFacts(
        task="classify",
        num_classes=_num_classes(training, form),
        channels=channels,
        height=height,
        width=width,
        features=features,
        form=form,
    )


def _num_classes(training: Any, form: Columns | None) -> int:
    """Returns the number of classes that a data set names, 0 if it names none."""
    features = getattr(training, "features", None)
    column = features.get(form.target) if isinstance(features, Mapping) and form is not None else None
    count = getattr(column, "num_classes", None)
    classes = getattr(training, "classes", None)
    if isinstance(count, int):
        return count
    return len(classes) if isinstance(classes, list | tuple) else 0
