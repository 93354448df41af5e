"""A loop over cases in one test: each is tried, and the first that fails is named."""

from __future__ import annotations

import inspect

import pytest

from tests.looped import looped


def test_every_case_is_tried_with_every_other_one_and_fixtures_are_left_to_pytest() -> None:
    seen = []

    @looped("first", [1, 2])
    @looped(("second", "third"), [("a", 3), ("b", 4)])
    def check(first: int, second: str, third: int, tmp_path: str) -> None:
        seen.append((first, second, third, tmp_path))

    assert [*inspect.signature(check).parameters] == ["tmp_path"]
    check(tmp_path="there")
    assert seen == [(1, "a", 3, "there"), (1, "b", 4, "there"), (2, "a", 3, "there"), (2, "b", 4, "there")]


def test_the_case_that_fails_is_named() -> None:
    @looped("number", range(5))
    def check(number: int) -> None:
        assert number < 3

    with pytest.raises(AssertionError) as failure:
        check()
    assert failure.value.__notes__ == ["in case 3 of 5: {'number': 3}"]


def test_values_of_a_function_are_made_by_the_test() -> None:
    made, seen = [3, 4], []

    @looped("number", lambda: made)
    def check(number: int) -> None:
        seen.append(number)

    made.append(5)
    check()
    assert seen == [3, 4, 5]
    made.clear()
    with pytest.raises(ValueError, match="there is no case of number"):
        check()


def test_a_test_without_a_case_is_refused() -> None:
    with pytest.raises(ValueError, match="there is no case of number"):
        looped("number", [])
