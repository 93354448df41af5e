"""What processes say of layers: compared by mark, and whose fault a difference is."""

from __future__ import annotations

import pytest

from engine.core.checks.trajectory import DATA, PurityBook
from engine.core.errors import UserError


def marks(given: str = "i", output: str = "o") -> dict[str, str]:
    return {"input": given, "output": output, "weight gradient": "g"}


def test_what_all_say_alike_is_pure() -> None:
    book = PurityBook()
    book.add(0, [("a", marks()), ("b", marks("o"))])
    book.add(1, [("b", marks("o")), ("c", marks())])
    book.add(2, [("a", marks())])


def test_all_that_differ_are_named_with_both_workers() -> None:
    book = PurityBook("mine:rows")
    book.add(0, [("a", marks()), ("b", marks()), (DATA, {"microbatch 0": "x" * 8 + "t" * 8})])
    with pytest.raises(UserError) as caught:
        book.add(3, [("a", marks(output="p")), ("b", marks(output="p")), (DATA, {"microbatch 0": "y" * 8 + "t" * 8})])
    assert [(problem.field, problem.found) for problem in caught.value.problems] == [
        ("model", "a: its output differs between worker 0 and worker 3"),
        ("model", "b: its output differs between worker 0 and worker 3"),
        ("data", "mine:rows: the inputs of microbatch 0 differ between worker 0 and worker 3"),
    ]


def test_a_layer_that_was_called_with_something_else_is_not_to_blame() -> None:
    book = PurityBook()
    book.add(0, [("a", marks()), ("b", marks("o", "b"))])
    with pytest.raises(UserError) as caught:
        book.add(1, [("a", marks(output="p")), ("b", marks("p", "c"))])
    assert len(caught.value.problems) == 1
