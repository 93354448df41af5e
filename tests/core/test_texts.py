"""Nouns with their numbers."""

from __future__ import annotations

from engine.core.texts import counted, numbered, places_text, spans


def test_a_large_number_has_all_its_digits() -> None:
    """Before: a job of a million steps had ``1e+06 steps`` on its page."""
    assert counted(1_000_000, "step") == "1000000 steps"
    assert [counted(1, "step"), counted(2.5, "unit")] == ["1 step", "2.5 units"]
    assert counted(2, "microbatch", "microbatches") == "2 microbatches"


def test_things_have_their_numbers() -> None:
    assert numbered("worker", [1]) == "worker 1"
    assert numbered("worker", (1, 2), " and ") == "workers 1 and 2"


def test_slots_have_their_pipeline_where_there_are_several() -> None:
    assert places_text("block", (3, 1), 6, 6) == "blocks 1, 3"
    assert places_text("block", (7, 1, 0), 6, 12) == "blocks 0, 1 of pipeline 0 and block 1 of pipeline 1"
    assert places_text("block", (), 6, 12) == ""


def test_three_neighbours_are_a_span() -> None:
    assert spans([]) == []
    assert spans([4]) == ["4"]
    assert spans([0, 1, 3, 4, 5, 7]) == ["0", "1", "3-5", "7"]
    assert spans([2, 1, 0, 1, 2]) == ["2", "1", "0-2"]
