"""Inventories as text: the text of one, exact round trips of many, and what is refused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.core.errors import InvariantError
from engine.core.program.inventory import Inventory, SavedResiduals, ValueRuns, from_json, to_json
from engine.core.value import Kind, Value
from tests.looped import looped

_SOME = Inventory(
    3,
    7,
    whole=((0, 1), (0, 2)),
    counted={(0, 1): 4},
    added={(0, 1): 2},
    logged=((0, 2),),
    values=ValueRuns((*(Value(Kind.ACTIVATION, 0, 1, each) for each in (0, 1, 2, 5)), Value(Kind.RESIDUAL, 0, 1, 3))),
)
_TEXT = (
    '{"worker":3,"step":7,"whole":[[0,1],[0,2]],"counted":[[0,1,4]],"added":[[0,1,2]],"logged":[[0,2]],'
    '"values":[["activation",0,1,[0,2],[5,5]],["residual",0,1,[3,3]]]}'
)


def test_text_of_an_inventory() -> None:
    assert to_json(_SOME) == _TEXT
    assert from_json(_TEXT) == _SOME


def test_residuals_that_can_be_sent_are_a_part_of_the_text() -> None:
    saved = replace(_SOME, saved={(0, 1): SavedResiduals(3, (4096, 2048), 7, 9, 5)}, stuck="why", rates={2: 8})
    text = _TEXT[:-1] + ',"stuck":"why","rates":[[2,8]],"saved":[[0,1,3,7,9,5,4096,2048]]}'
    assert (to_json(saved), from_json(text)) == (text, saved)
    for old, new in (
        ("4096", "-1"),
        ('"why"', "3"),
        ("3,7", "3.0,7"),
        ("[[2,8]]", "[[2,-8]]"),
        ("[[0,1,3,7,9,5,4096,2048]]", "[[0,1,3,7]]"),
    ):
        with pytest.raises(InvariantError, match="not an inventory"):
            from_json(text.replace(old, new))


def test_order_of_what_is_given_does_not_matter() -> None:
    turned = Inventory(
        3,
        7,
        _SOME.whole[::-1],
        _SOME.counted,
        _SOME.added,
        logged=_SOME.logged,
        values=ValueRuns(list(_SOME.values)[::-1]),
    )
    assert to_json(turned) == _TEXT


def test_length_does_not_grow_with_microbatches() -> None:
    values = tuple(Value(kind, 0, 3, each) for kind in (Kind.ACTIVATION, Kind.RESIDUAL) for each in range(512))
    assert len(to_json(Inventory(3, 0, ((0, 3),), values=ValueRuns(values)))) < 150


@looped("seed", range(50))
def test_round_trip(seed: int) -> None:
    order = random.Random(seed)  # noqa: S311 - nothing here is secret
    slots = sorted({(order.randrange(3), order.randrange(4)) for _ in range(order.randrange(6))})
    kinds = (Kind.ACTIVATION, Kind.GRADIENT, Kind.RESIDUAL, Kind.PENDING)
    values = {Value(order.choice(kinds), *order.choice(slots), order.randrange(9)) for _ in range(20 if slots else 0)}
    inventory = Inventory(
        order.randrange(100),
        order.randrange(100),
        tuple(slots),
        {slot: order.randrange(9) for slot in slots},
        {slot: order.randrange(9) for slot in slots[1:]},
        tuple(slots[:1]),
        ValueRuns(values),
    )
    assert from_json(to_json(inventory)) == inventory


@looped(
    ("old", "new"),
    [
        (_TEXT, ""),
        (_TEXT, "[]"),
        (_TEXT, "[" * 100_000),
        (_TEXT, "null"),
        (_TEXT, '{"worker":3}'),
        ('"worker":3', '"worker":-3'),
        ('"worker":3', '"worker":3.0'),
        ('"worker":3', '"worker":true'),
        ('"worker":3', '"worker":"3"'),
        ('"worker":3', '"worker": 3'),
        ('"worker":3', '"worker":3,"more":1'),
        ("[[0,1],[0,2]]", "[[0,2],[0,1]]"),
        ("[[0,1],[0,2]]", "[[0,1],[0,1,2]]"),
        ("[[0,1,4]]", "[[0,1]]"),
        ("[[0,1,4]]", "[[0,1,4],[0,1,4]]"),
        ("[0,2],[5,5]", "[0,2],[3,5]"),
        ("[0,2],[5,5]", "[5,5],[0,2]"),
        ("[0,2],[5,5]", "[2,0],[5,5]"),
        ("[0,2],[5,5]", "[-1,2],[5,5]"),
        ("[0,2],[5,5]", "[0,2,5]"),
        ("[0,2],[5,5]", ""),
        ('"activation"', '"state"'),
        ('"activation"', '"Activation"'),
        ('"residual"', '"activation"'),
        ("]]}", "]]} "),
    ],
)
def test_malformed_text_is_refused(old: str, new: str) -> None:
    with pytest.raises(InvariantError, match="not an inventory"):
        from_json(_TEXT.replace(old, new))
