"""Partitions: balanced ones against brute force, and every refusal."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.core.errors import UserError
from engine.core.job.partition import MOST_LAYERS, balanced, partition
from tests.looped import looped

KINDS = ["Embedding", "Block", "Block", "Block", "Norm", "Linear"]
SIZES = [100, 30, 30, 30, 1, 100]


def loads(starts: Sequence[int], weights: Sequence[int]) -> list[int]:
    """Returns the weight of each stage."""
    return [sum(weights[first:end]) for first, end in zip(starts, [*starts[1:], len(weights)], strict=True)]


def lightest_possible(weights: Sequence[int], num_stages: int) -> int:
    """Returns the heaviest stage of the best partition, found by trying all of them."""
    cuts = itertools.combinations(range(1, len(weights)), num_stages - 1)
    return min(max(loads((0, *cut), weights)) for cut in cuts)


def refusal(form: str, num_stages: int, kinds: Sequence[str] = KINDS) -> str:
    """Returns what a refused partition says."""
    with pytest.raises(UserError) as refused:
        partition(form, num_stages, kinds, SIZES)
    return str(refused.value)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=9), st.data())
def test_balanced_is_as_light_as_can_be_and_never_empty(weights: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(weights)))
    starts = balanced(weights, num_stages)
    assert len(starts) == num_stages
    assert starts[0] == 0
    assert list(starts) == sorted(set(starts))
    assert starts[-1] < len(weights)
    assert max(loads(starts, weights)) == lightest_possible(weights, num_stages)


@pytest.mark.parametrize(
    ("num_stages", "starts"),
    [(1, (0,)), (2, (0, 3)), (3, (0, 2, 4)), (4, (0, 1, 3, 4)), (6, (0, 1, 2, 3, 4, 5))],
)
def test_uniform_differs_by_at_most_one_layer(num_stages: int, starts: tuple[int, ...]) -> None:
    assert partition("uniform", num_stages, KINDS, ()) == starts
    sizes = loads(starts, [1] * len(KINDS))
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("form", ["parameters", "profile"])
def test_weights_are_balanced(form: str) -> None:
    assert partition(form, 3, KINDS, SIZES) == (0, 1, 5)


def test_type_spreads_the_layers_that_match() -> None:
    starts = partition("type:^block$", 3, KINDS, ())
    assert loads(starts, [kind == "Block" for kind in KINDS]) == [1, 1, 1]
    assert partition("type:block", 1, KINDS, ()) == (0,)


def test_type_with_fewer_matches_than_stages_leaves_no_stage_empty() -> None:
    starts = partition("type:Norm", 4, KINDS, ())
    assert list(starts) == sorted(set(starts))
    assert len(starts) == 4


def test_layers_whose_names_travel_in_one_message_are_taken() -> None:
    assert partition("uniform", 2, ["Block"] * MOST_LAYERS, ()) == (0, MOST_LAYERS // 2)
    assert (
        refusal("uniform", 2, ["Block"] * (MOST_LAYERS + 1))
        == f"model: expected at most {MOST_LAYERS} layers, found 8193"
    )


def test_custom_is_taken_as_it_stands() -> None:
    assert partition("2,5", 3, KINDS, ()) == (0, 2, 5)
    assert partition("", 1, KINDS, ()) == (0,)


@pytest.mark.parametrize("form", ["uniform", "parameters", "type:Block", "1,2,3,4,5,6"])
def test_more_stages_than_layers(form: str) -> None:
    assert refusal(form, 7) == "stages: expected at most 6, the layers of the model, found 7"


def test_pattern_that_matches_nothing() -> None:
    assert refusal("type:Conv", 2) == (
        "partition: expected a pattern that matches a layer's class (Block, Embedding, Linear, Norm), found 'Conv'"
    )


@looped("form", ["2", "2,4,5", "4,2", "2,2", "0,2", "2,6", ""])
def test_custom_that_does_not_fit(form: str) -> None:
    assert refusal(form, 3) == f"partition: expected 2 rising layer numbers from 1 to 5, found {form!r}"
