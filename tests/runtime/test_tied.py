"""Tied parameters: which stages share one, and the order in which gradients are added."""

from __future__ import annotations

import torch

from engine.models.layers import Tie
from engine.runtime.stage.stage import later_uses, stage_of, sum_in_layer_order, tied_stages, uses_of

TIES = (Tie(((0, "weight"), (5, "weight"))), Tie(((4, "b"), (1, "a"), (3, "c"))))


def test_stage_of_a_layer() -> None:
    assert [stage_of(layer, (0, 2, 5)) for layer in range(7)] == [0, 0, 1, 1, 1, 2, 2]


def test_uses_are_in_layer_order_however_they_are_written() -> None:
    first, second = uses_of(TIES, (0, 2, 5))
    assert [(use.tie, use.order, use.stage, use.layer, use.name) for use in first] == [
        (0, 0, 0, 0, "weight"),
        (0, 1, 2, 5, "weight"),
    ]
    assert [(use.tie, use.order, use.stage, use.layer, use.name) for use in second] == [
        (1, 0, 0, 1, "a"),
        (1, 1, 1, 3, "c"),
        (1, 2, 1, 4, "b"),
    ]


def test_ties_within_a_stage_bind_no_stages() -> None:
    assert tied_stages(TIES, (0, 2, 5)) == ((0, 1), (0, 2))
    assert tied_stages(TIES, (0,)) == ()
    assert tied_stages(TIES, (0, 1)) == ((0, 1),)
    assert tied_stages((), (0, 1)) == ()


def test_all_uses_but_the_first_are_left_out_of_norms() -> None:
    assert later_uses(TIES) == {(5, "weight"), (3, "c"), (4, "b")}


def test_the_sum_is_in_the_given_order_and_out_of_place() -> None:
    gradients = [torch.tensor([value]) for value in (1.0, 1.0, 2.0**24)]
    before = [gradient.clone() for gradient in gradients]
    assert sum_in_layer_order(gradients).item() == (1.0 + 1.0) + 2.0**24
    assert sum_in_layer_order(gradients[::-1]).item() == 2.0**24
    assert all(torch.equal(*pair) for pair in zip(gradients, before, strict=True))
    (alone,) = gradients[:1]
    assert sum_in_layer_order([alone]) is not alone
