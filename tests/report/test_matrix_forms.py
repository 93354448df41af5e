"""The outputs of a matrix: JUnit, GitHub's summary and annotations, the grid; all escape hostile text."""

from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest

from engine.core.checks.cell_result import CellResult
from engine.report.ci_text import MAX_BYTES, error_commands, junit_xml, step_summary
from engine.report.pages.matrix_page import LEGEND, CellGrid, grid_of, grid_parts

HOSTILE = "a|b <script>\n::error::x % \x00\x1b[31m, :"
PASSED = CellResult(
    "step/F/first", "passed", "", "all", "kill", 0.5, 3, "run-1", {"action": "F", "stage": "first", "fault": "kill"}, 7
)
FAILED = CellResult(
    "step/B/first",
    "failed",
    "mismatch",
    HOSTILE,
    "stop",
    1.25,
    4,
    "run-2",
    {"action": "B", "stage": "first", "fault": "stop"},
    9,
)
INVALID = CellResult(
    "step/B/last",
    "invalid",
    "",
    "nothing struck",
    "kill",
    0.0,
    0,
    "",
    {"action": "B", "stage": "last", "fault": "kill"},
)
ALL = [PASSED, FAILED, INVALID]


def test_junit() -> None:
    (suite,) = ET.fromstring(junit_xml("m", ALL))  # noqa: S314 - it is our own
    assert suite.attrib == {"name": "m", "tests": "3", "failures": "1", "errors": "1", "skipped": "0", "time": "1.750"}
    good, bad, void = suite
    assert good.attrib == {"classname": "bamboo.kill", "name": "step/F/first", "time": "0.500"}
    assert [each.attrib for each in good[0]] == [{"name": "seed", "value": "3"}, {"name": "run", "value": "run-1"}]
    assert len(good) == 1
    assert (bad[1].tag, bad[1].get("type")) == ("failure", "mismatch")
    assert bad[1].get("message") == "a|b <script>"
    assert "x % ?, :" in str(bad[1].text)  # neither may steer a terminal
    assert (void[1].tag, void[1].get("type")) == ("error", "invalid")


@pytest.mark.parametrize("failure", ["threshold", "mismatch", "no_recovery", "hang"])
def test_junit_types_of_failures(failure: str) -> None:
    result = CellResult("a", "failed", failure, "t", "kill", 1.0, 0, "r")  # type: ignore[arg-type]
    assert f'<failure type="{failure}"' in junit_xml("m", [result])


def test_a_summary_is_a_table() -> None:
    text = step_summary("m", ALL)
    lines = text.splitlines()
    assert lines[0] == "### bamboo matrix m: 1 passed, 1 failed, 1 invalid"
    assert [line.split(" | ")[0] for line in lines[4:]] == ["| step/B/first", "| step/B/last", "| step/F/first"]
    assert all(line.replace("\\|", "").count("|") == 6 for line in lines[4:])
    assert "<script>" not in text


def test_a_long_summary_says_what_it_leaves_out() -> None:
    many = [PASSED] * 40_000
    text = step_summary("m", many)
    assert MAX_BYTES - 1000 < len(text.encode()) <= MAX_BYTES
    *_, last = text.splitlines()
    shown = text.count("step/F/first")
    assert last == f"truncated: {len(many) - shown} more cells are not shown"


def test_annotations_name_file_and_line_and_cannot_be_left() -> None:
    one, two = error_commands("a,b:c.yaml", ALL)
    head = "::error file=a%2Cb%3Ac.yaml,line=9,title=step/B/first failed (mismatch)::"
    assert one == head + "a|b <script>%0A::error::x %25 \x00\x1b[31m, :"
    assert two == "::error file=a%2Cb%3Ac.yaml,line=1,title=step/B/last invalid::nothing struck"


def cells_of(results: list[CellResult]) -> list[tuple[str, dict[str, str]]]:
    return [(each.cell, dict(each.labels)) for each in results]


def grid_text(grid: CellGrid) -> str:
    return "".join(text for text, _ in grid_parts(grid))


def test_the_grid_says_all_in_letters() -> None:
    cells = [*cells_of(ALL), ("step/F/last", {"action": "F", "stage": "last", "fault": "kill"})]
    text = grid_text(grid_of(cells, {each.cell: each for each in ALL}))
    assert text.splitlines() == [
        "   kill  stop",
        "   f l   f",
        "F  P -",
        "B    I   F",
        LEGEND,
    ]


def test_stages_stand_in_order_also_where_an_action_lacks_the_first() -> None:
    columns = [("RECV_F", "last"), ("F", "first"), ("F", "last")]
    cells = [("/".join(each), {"action": each[0], "stage": each[1], "fault": "kill"}) for each in columns]
    assert grid_of(cells, {}).columns == (("kill", "first"), ("kill", "last"))


def letters(grid: CellGrid) -> list[str | None]:
    return [grid.letter(row, column) for row in grid.rows for column in grid.columns]


def test_a_field_shows_the_worst_of_its_cells() -> None:
    labels = {"action": "F", "stage": "first", "fault": "kill"}
    cells = [("a", labels), ("b", labels), ("c", labels)]
    of = {
        "a": CellResult("a", "passed", "", "", "kill", 1, 0, ""),
        "b": CellResult("b", "invalid", "", "", "kill", 1, 0, ""),
    }
    grid = grid_of(cells, of)
    assert letters(grid) == ["I"]
    of["c"] = CellResult("c", "failed", "hang", "", "kill", 1, 0, "")
    assert letters(grid_of(cells, of)) == ["F"]


def test_colours_come_beside_the_letters() -> None:
    grid = grid_of(cells_of(ALL), {each.cell: each for each in ALL})
    assert [part for part in grid_parts(grid) if part[1]] == [("P", "P"), ("I", "I"), ("F", "F")]


def test_cells_without_those_axes_are_rows() -> None:
    one = CellResult("first", "passed", "", "", "kill", 1, 0, "")
    assert grid_text(grid_of([("first", {})], {"first": one})).splitlines() == ["first  P", LEGEND]
