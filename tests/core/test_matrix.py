"""Axes x cases make cells: which, in which order, what is in them and where it was written; and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import UserError
from engine.core.faults.matrix import Axis, MatrixCase, cells

STAGE = Axis("stage", {"first": "first", "last": "last"}, {"first": ("axes", "stage", 0), "last": ("axes", "stage", 1)})
FAULT = Axis(
    "fault", {"kill": {"do": "kill"}, "stop": {"do": "stop", "for": "1s"}}, {"stop": ("axes", "fault", "stop")}
)


def case(faults: Any, name: str = "a", only: dict[str, tuple[str, ...]] | None = None, **job: Any) -> MatrixCase:
    return MatrixCase(name, {"job": {"stages": 3, **job}, "faults": faults}, only or {}, ("cases", 0))


def test_every_combination_once_in_order() -> None:
    made = cells((STAGE, FAULT), (case([{"at": {"stage": "$stage"}, "with": "$fault"}]),))
    assert [each.name for each in made] == ["a/first/kill", "a/first/stop", "a/last/kill", "a/last/stop"]
    assert made[3].values == {"job": {"stages": 3}, "faults": [{"at": {"stage": 2}, "do": "stop", "for": "1s"}]}
    assert made[3].labels == (("stage", "last"), ("fault", "stop"))


def test_a_case_is_made_for_its_own_axes_only() -> None:
    cases = (case([{"do": "$kind"}], "a"), case([{"do": "kill"}], "b"))
    kinds = Axis("kind", {"kill": "kill", "exit": "exit"})
    assert [each.name for each in cells((kinds,), cases)] == ["a/kill", "a/exit", "b"]


def test_only_names_labels_of_an_axis() -> None:
    made = cells((STAGE,), (case([{"at": {"stage": "$stage"}}], only={"stage": ("last",)}),))
    assert [each.name for each in made] == ["a/last"]


@pytest.mark.parametrize(("label", "number"), [("first", 0), ("middle", 2), ("last", 4)])
def test_stages_by_their_place(label: str, number: int) -> None:
    (made,) = cells((), (case([{"at": {"stage": label}, "target": {"stage": label}}], stages=5),))
    assert made.values["faults"] == [{"at": {"stage": number}, "target": {"stage": number}}]


def test_stages_by_their_place_in_the_default_job() -> None:
    (made,) = cells((), (MatrixCase("a", {"faults": [{"at": {"stage": "last"}}]}, {}, ("cases", 0)),))
    assert made.values["faults"][0]["at"]["stage"] == 3


def test_several_axes_go_in_together() -> None:
    job = Axis("job", {"eager": {"redundancy": "eager"}})
    (made,) = cells((FAULT, job), (case([{"with": ["$fault", "$job"]}], only={"fault": ("stop",)}),))
    assert made.values["faults"] == [{"do": "stop", "for": "1s", "redundancy": "eager"}]


def test_it_is_known_where_each_value_was_written() -> None:
    made = cells((STAGE, FAULT), (case([{"at": {"stage": "$stage"}, "with": "$fault"}]),))
    origins = made[3].origins
    assert origins["faults", 0, "at", "stage"] == ("axes", "stage", 1)
    assert origins["faults", 0, "for"] == ("axes", "fault", "stop", "for")
    assert origins["job", "stages"] == ("cases", 0, "job", "stages")
    assert origins["faults", 0] == ("cases", 0, "faults", 0)


def test_cells_share_nothing() -> None:
    first, second = cells((Axis("kind", {"a": "a", "b": "b"}),), (case([{"do": "$kind"}]),))
    first.values["job"]["stages"] = 9
    assert second.values["job"]["stages"] == 3


def test_all_mistakes_come_out_at_once() -> None:
    cases = (
        case([{"do": "$kin"}], only={"stage": ("first",), "kind": ("x",)}),
        case([{"do": "$kind"}], only={"kind": ("b",)}),
    )
    axes = (Axis("kind", {"a": "a"}), Axis("more", {"c": "c"}))
    with pytest.raises(UserError) as raised:
        cells(axes, cases)
    assert [(each.field, each.found) for each in raised.value.problems] == [
        ("cases.0.faults.0.do", "'$kin'"),
        ("cases.0.only.stage", "'stage'"),
        ("cases.0.only.kind", "'kind'"),
        ("cases.0.only.kind", "'b'"),
        ("axes.more", "'$more'"),
    ]
    assert raised.value.problems[0].hint == "did you mean 'kind'?"
