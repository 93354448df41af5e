"""Tied parameters: each use has its own copy and its own gradient; the gradients are added in layer order.

This also holds for two uses on one worker, so that the cut into stages does not change a bit. Every copy takes the same
optimizer step and stays equal to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from engine.models.layers import Tie


@dataclass(frozen=True, slots=True)
class Use:
    """One use of tie number `tie`: parameter `name` of layer `layer` in stage `stage`."""

    tie: int
    order: int
    stage: int
    layer: int
    name: str


def stage_of(layer: int, starts: Sequence[int]) -> int:
    """Returns the stage that contains a layer; `starts` has the first layer of each stage."""
    return max(stage for stage, start in enumerate(starts) if start <= layer)


def uses_of(ties: Sequence[Tie], starts: Sequence[int]) -> list[list[Use]]:
    """Returns the uses of each tie, in layer order."""
    return [
        [Use(tie, order, stage_of(layer, starts), layer, name) for order, (layer, name) in enumerate(sorted(each.uses))]
        for tie, each in enumerate(ties)
    ]


def tied_stages(ties: Sequence[Tie], starts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of stages that share a parameter, for `Grid.ties`; groups within one stage are left out."""
    groups = {tuple(sorted({use.stage for use in uses})) for uses in uses_of(ties, starts)}
    return tuple(sorted(group for group in groups if len(group) > 1))


def later_uses(ties: Sequence[Tie]) -> set[tuple[int, str]]:
    """Returns the uses after the first of each tie; a gradient norm leaves them out, as they repeat the first's."""
    return {use for tie in ties for use in sorted(tie.uses)[1:]}


def sum_in_layer_order(gradients: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the gradients of a tie's uses, given in layer order, as a new tensor."""
    total = gradients[0].clone()
    for gradient in gradients[1:]:
        total += gradient
    return total
