"""The audit book: whole steps become rows, replicas that disagree are a broken promise."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest

from engine.core.checks.trajectory import NO_MARKS, AuditBook, TrajectoryRow
from engine.core.errors import InvariantError

ONE, OTHER = "0" * 64, "f" * 64


def test_layers_of_one_pipeline_become_rows_in_layer_order() -> None:
    book = AuditBook(num_layers=3, num_pipelines=1)
    book.add(7, 1, 0, {2: ("s2", "b2")})
    book.add(7, 0, 0, {0: ("s0", "b0"), 1: ("s1", "b1")})
    assert book.close(7, 1.5) == [TrajectoryRow(7, layer, f"s{layer}", f"b{layer}", 1.5) for layer in range(3)]


def test_an_unaudited_step_has_no_rows_and_a_closed_one_is_forgotten() -> None:
    book = AuditBook(num_layers=1, num_pipelines=1)
    assert book.close(0, 1.0) == []
    book.add(1, 0, 0, {0: ("s", "b")})
    assert len(book.close(1, 1.0)) == 1
    assert book.close(2, 1.0) == []


def test_a_layer_that_nobody_reported_leaves_the_step_without_rows() -> None:
    book = AuditBook(num_layers=2, num_pipelines=2)
    for pipeline in range(2):
        book.add(0, pipeline, pipeline, {0: ("s", "b")})
    book.add(0, 2, 1, {1: ("s", "b")})
    assert book.close(0, 1.0) == []


def test_buffers_of_pipelines_differ_by_right_and_are_hashed_in_pipeline_order() -> None:
    book = AuditBook(num_layers=1, num_pipelines=3)
    for pipeline in (2, 0, 1):
        book.add(0, pipeline, pipeline, {0: ("s", f"b{pipeline}")})
    assert book.close(0, 1.0) == [TrajectoryRow(0, 0, "s", hashlib.sha256(b"b0\nb1\nb2").hexdigest(), 1.0)]


def test_who_disagrees_is_told_the_tensor() -> None:
    book = AuditBook(num_layers=1, num_pipelines=1)
    book.add(0, 0, 0, {0: ("s", "b")}, {0: ([("bias", "11"), ("weight", "22"), ("weight exp_avg", "33")], ())})
    with pytest.raises(InvariantError, match="step 0: layer 0, tensor weight, differs between worker 0"):
        book.add(0, 1, 0, {0: ("t", "b")}, {0: ([["bias", "11"], ["weight", "99"], ["weight exp_avg", "88"]], ())})


def test_rows_keep_the_marks_of_their_tensors() -> None:
    book = AuditBook(num_layers=2, num_pipelines=2)
    marks = ([("bias", "11111111"), ("weight", "22222222")], [("mean", "33333333")])
    for pipeline in (1, 0):
        book.add(0, pipeline, pipeline, {0: ("s", "b"), 1: ("s", "b")}, {0: marks})
    marked, plain = book.close(0, 1.0)
    assert marked.marks == ((("bias", "weight"), "1111111122222222"), (("mean",), "33333333"))
    assert plain.marks == (NO_MARKS, NO_MARKS)
    assert replace(marked, layer=1) == plain  # marks only explain a difference


def test_an_owner_and_its_shadows_make_one_row() -> None:
    book = AuditBook(num_layers=1, num_pipelines=1)
    for worker in range(3):
        book.add(0, worker, 0, {0: ("s", "b")})
    assert book.close(0, 1.0) == [TrajectoryRow(0, 0, "s", "b", 1.0)]


@pytest.mark.parametrize("pipeline", [0, 1])
def test_replicas_that_disagree_on_weights_break_a_promise(pipeline: int) -> None:
    book = AuditBook(num_layers=2, num_pipelines=2)
    book.add(4, 0, 0, {0: ("same", ""), 1: (ONE, "")})
    with pytest.raises(InvariantError) as broken:
        book.add(4, 3, pipeline, {0: ("same", ""), 1: (OTHER, "")})
    assert str(broken.value) == (
        f"step 4: layer 1 differs between worker 0 in pipeline 0 and worker 3 in pipeline {pipeline}: "
        f"{'0' * 12} and {'f' * 12}. Either may be the wrong one: a bit may have flipped in a memory or a processor, "
        "or bamboo has a bug"
    )


def test_replicas_of_one_pipeline_that_disagree_on_buffers_break_a_promise() -> None:
    book = AuditBook(num_layers=1, num_pipelines=1)
    book.add(4, 0, 0, {0: ("same", ONE)})
    with pytest.raises(InvariantError, match=r"^step 4: a buffer of layer 0 differs between worker 0 .* worker 1 "):
        book.add(4, 1, 0, {0: ("same", OTHER)})


def test_what_replicas_disagree_on_is_in_no_row() -> None:
    book = AuditBook(num_layers=1, num_pipelines=1)
    book.add(4, 0, 0, {0: (ONE, "")})
    with pytest.raises(InvariantError):
        book.add(4, 1, 0, {0: (OTHER, "")})
    assert book.close(4, 1.0) == []
