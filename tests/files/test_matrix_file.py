"""Matrix files: they expand to cells that can run, and every mistake is reported at its place."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.errors import NothingMatchedError, UserError
from engine.files.jobs.library import library
from engine.files.jobs.matrix_file import Matrix, read_matrix
from engine.runtime.faults.registry import kinds

GOOD = """\
version: 1
name: some
about: what it shows
job: {model: mlp, stages: 3, microbatches: 2, steps: 4}
expect: {trajectory: identical}
axes:
  action: [RECV_F, B]
  stage: [first, last]
  fault:
    kill: {do: kill}
    stop: {do: stop, for: 1s}
cases:
  - name: one
    faults: [{at: {step: 1, stage: $stage, action: $action}, with: $fault}]
"""


def read(tmp_path: Path, text: str, *settings: str) -> Matrix:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    return read_matrix(str(path), kinds(), settings)


def problems(tmp_path: Path, text: str) -> list[str]:
    with pytest.raises(UserError) as raised:
        read(tmp_path, text)
    return [str(each).removeprefix(f"{tmp_path}/") for each in raised.value.problems]


def test_cells_are_scenarios(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD)
    names = [each.cell.name for each in found.cells]
    assert names == [
        "one/RECV_F/last/kill",
        "one/RECV_F/last/stop",
        "one/B/first/kill",
        "one/B/first/stop",
        "one/B/last/kill",
        "one/B/last/stop",
    ]
    last = found.cells[-1].loaded
    assert [each.in_words("stage") for each in last.faults] == ["stop before 2B1 of step 1 (for 1s)"]
    assert last.scenario.job.model == "mlp"
    assert last.scenario.expect.trajectory == "identical"
    assert {each.line for each in found.cells} == {13}


def test_combinations_that_cannot_be_are_no_cells(tmp_path: Path) -> None:
    assert [each.name for each in read(tmp_path, GOOD).absent] == ["one/RECV_F/first/kill", "one/RECV_F/first/stop"]


def test_a_value_of_an_axis_without_any_cell_is_a_mistake(tmp_path: Path) -> None:
    text = GOOD.replace("stage: [first, last]", "stage: [first]")
    assert problems(tmp_path, text) == [
        "m.yaml:13:5: axes.action: expected values with a cell, found 'RECV_F' (no stage of any case has it)"
    ]


def test_settings_hold_for_every_cell(tmp_path: Path) -> None:
    found = read(tmp_path, GOOD, "redundancy=eager")
    assert {each.loaded.scenario.job.redundancy for each in found.cells} == {"eager"}


def test_a_case_decides_what_it_says_itself(tmp_path: Path) -> None:
    text = GOOD.replace("  - name: one\n", "  - name: one\n    job: {steps: 9}\n    expect: {steps_lost: 0}\n")
    scenario = read(tmp_path, text).cells[0].loaded.scenario
    assert (scenario.job.steps, scenario.job.stages) == (9, 3)
    assert (scenario.expect.steps_lost, scenario.expect.trajectory) == (0, "identical")


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("version: 1", "version: 2", "1:10: version: expected 1, found 2"),
        ("name: some", "nam: some", "2:1: nam: expected a field that is known here, found 'nam'"),
        ("steps: 4}", "steps: 0}", "4:54: job.steps: expected a whole number >= 1, found 0"),
        ("action: [RECV_F, B]", "action: [B, BB]", "7:15: faults.0.at.action: expected one of"),
        ("step: 1", "step: 7", "14:26: faults.0.at.step: expected a step from 0 to 3, found 7"),
        ("for: 1s", "for: soon", "11:27: faults.0.for: expected a duration"),
        ("with: $fault", "do: $fault", "14:66: cases.0.faults.0.do: expected an axis whose values are no mappings"),
        (
            "action: $action",
            "with: $action",
            "14:50: cases.0.faults.0.at.with: expected an axis whose values are mappi",
        ),
        ("$stage", "$stag", "14:36: cases.0.faults.0.at.stage: expected the name of an axis after $, found '$stag'"),
        ("$fault", "fualt", "14:68: cases.0.faults.0.with: expected the name of an axis after $, found '$fualt'"),
        ("[first, last]", "[first, first]", "8:18: axes.stage.1: expected each value once, found 'first'"),
        (
            "[first, last]",
            "[]",
            "8:10: axes.stage: expected a list of values, or a mapping of label: fields, found an empty list",
        ),
        ("[first, last]", "[first, $fault]", "8:18: axes.stage.1: expected a value that names no other axis"),
        ("kill: {do: kill}", "kill: 3", "10:11: axes.fault.kill: expected a mapping of fields, found 3"),
        (
            "- name: one",
            "- name: one\n    only: {stage: [x]}",
            "14:19: cases.0.only.stage: expected one of first, last",
        ),
    ],
)
def test_mistakes_are_told_with_their_place(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert GOOD.count(old) == 1
    found = problems(tmp_path, GOOD.replace(old, new))
    assert any(each.startswith(f"m.yaml:{problem}") for each in found), found


def test_two_cases_of_one_name(tmp_path: Path) -> None:
    text = GOOD + GOOD.partition("cases:\n")[2]
    assert problems(tmp_path, text) == ["m.yaml:15:11: cases.1.name: expected a name of its own, found 'one'"]


def test_a_scenario_is_a_matrix_of_one_cell() -> None:
    found = read_matrix("kill-middle-stage", kinds())
    assert [each.cell.name for each in found.cells] == ["kill-middle-stage"]
    assert found.absent == ()


def test_an_unknown_name() -> None:
    with pytest.raises(NothingMatchedError, match="did you mean 'matrix-smoke'"):
        read_matrix("matrix-smok", kinds())


def test_the_full_matrix_has_every_action_at_every_place_in_every_way() -> None:
    found = read_matrix("matrix-full", kinds())
    labels = [dict(each.cell.labels) for each in found.cells if each.cell.case == "step"]
    moments = {(each["action"], each["stage"]) for each in labels}
    edges = {("RECV_F", "first"), ("SEND_B", "first"), ("SEND_F", "last"), ("RECV_B", "last")}
    assert len(moments) == 3 * 10 - len(edges)
    assert {(dict(each.labels)["action"], dict(each.labels)["stage"]) for each in found.absent} == edges
    assert len(labels) == len(moments) * 3 * 3 * 3
    split, stream, heal = 2 * 3 * 3 * 3 * 3, 3 * 3 * 3 * 2, 3 * 3 * 3 * 2
    assert len(found.cells) == len(labels) + split + stream + heal


@pytest.mark.parametrize("path", sorted(library().glob("matrix-*.yaml")), ids=lambda path: path.stem)
def test_the_matrices_of_the_library_can_be_read(path: Path) -> None:
    found = read_matrix(path.stem, kinds())
    assert found.name == path.stem
    assert all(each.loaded.scenario.expect.trajectory == "identical" for each in found.cells)
    assert all(each.loaded.scenario.expect.culprit == "exact" for each in found.cells)


def test_all_layers_of_mistakes_come_out_at_once(tmp_path: Path) -> None:
    text = GOOD.replace("about: what", "abuot: what").replace("stage: [first, last]", "stage: [first, first]")
    text = text.replace("cases:\n", "cases:\n  - name: none\n").replace("with: $fault", "with: $stage")
    assert [each.split(" ")[1].rstrip(":") for each in problems(tmp_path, text)] == [
        "about",
        "abuot",
        "axes.stage.1",
        "cases.0.faults",
        "cases.1.faults.0.with",
    ]
