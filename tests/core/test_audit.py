"""The audit book: whole steps become rows, pipelines that disagree are a broken promise."""

from __future__ import annotations

import hashlib

import pytest

from engine.core.audit import AuditBook
from engine.core.errors import InvariantError
from engine.core.trajectory import Row


def test_layers_of_one_pipeline_become_rows_in_layer_order() -> None:
    book = AuditBook(num_layers=3, num_pipelines=1)
    book.add(0, {2: ("s2", "b2")})
    book.add(0, {0: ("s0", "b0"), 1: ("s1", "b1")})
    assert book.close(7, 1.5) == [Row(7, layer, f"s{layer}", f"b{layer}", 1.5) for layer in range(3)]


def test_an_unaudited_step_has_no_rows_and_a_closed_one_is_forgotten() -> None:
    book = AuditBook(num_layers=1, num_pipelines=1)
    assert book.close(0, 1.0) == []
    book.add(0, {0: ("s", "b")})
    assert len(book.close(1, 1.0)) == 1
    assert book.close(2, 1.0) == []


def test_buffers_of_pipelines_differ_by_right_and_are_hashed_in_pipeline_order() -> None:
    book = AuditBook(num_layers=1, num_pipelines=3)
    for pipeline in (2, 0, 1):
        book.add(pipeline, {0: ("s", f"b{pipeline}")})
    assert book.close(0, 1.0) == [Row(0, 0, "s", hashlib.sha256(b"b0\nb1\nb2").hexdigest(), 1.0)]


def test_pipelines_that_disagree_on_weights_break_a_promise() -> None:
    book = AuditBook(num_layers=2, num_pipelines=3)
    for pipeline in range(3):
        state = "f" * 64 if pipeline == 2 else "0" * 64
        book.add(pipeline, {0: ("same", ""), 1: (state, "")})
    with pytest.raises(InvariantError) as broken:
        book.close(4, 1.0)
    assert str(broken.value) == (f"step 4: layer 1 differs between pipelines 0 and 2: {'0' * 12} and {'f' * 12}")
