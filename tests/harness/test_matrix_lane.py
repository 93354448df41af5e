"""The exceptions in the workers of a cell: those of the user's code are shown with the name of the cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from bamboo_cli.matrix import _tell
from engine.codec.values import plain_of, value_of
from engine.core.checks.cell_result import CellResult
from engine.core.checks.expectations import Check, Observation
from engine.core.errors import ExitCode
from engine.core.history.run_history import history_of
from engine.core.history.run_records import ConfirmedRecord, RaisedRecord
from engine.harness.case import CaseResult
from engine.harness.matrix_lane import _checked, contradiction
from engine.report.ci_text import junit_xml
from tests.files.made_evidence import make_evidence

INJECTED = "RuntimeError: injected by fault 'fault-1'"
RECORDS = (
    RaisedRecord(of=1, step=3, error=INJECTED),
    ConfirmedRecord(fault="fault-1", how=f"raised: {INJECTED}"),
    RaisedRecord(of=2, step=4, error="ValueError: mine", place="the loss", file="mine.py", line=3, function="loss"),
)


def test_an_exception_that_no_fault_raised_is_shown_with_the_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that survived a mistake of the user's passed without a word about it."""
    seen = Observation(0, "", history_of(RECORDS))
    case = CaseResult(Path("run"), (), seen, (), ExitCode.OK, ())
    raised = case.exceptions()
    assert raised == ("worker 2 raised ValueError: mine, in the loss of step 4 (mine.py:3, in loss)",)
    cell = CellResult("kill/B", "passed", "", "", "kill", 1.0, 0, "", raised=raised)
    assert case.as_dict()["exceptions"] == raised
    assert value_of(plain_of(cell), CellResult, "it") == cell
    _tell(1, 2, cell, 3.0)
    assert capsys.readouterr().err.splitlines()[1] == f"    kill/B: {raised[0]}"


def test_a_passed_cell_is_held_against_its_evidence(tmp_path: Path) -> None:
    """The verdict was that of the live comparison alone."""
    run = make_evidence(tmp_path / "run")
    assert contradiction(run.path) == ""
    rows = run.trajectory.read_text()
    run.trajectory.write_text(rows.replace("a", "b"))
    assert contradiction(run.path).startswith("trajectory.csv: its bytes 0 to ")
    run.trajectory.write_text(rows)
    lines = run.events.read_text().splitlines(keepends=True)
    run.events.write_text("".join(lines[:-1]))
    assert contradiction(run.path) == "events.jsonl has no end: the command has not finished"
    assert contradiction(make_evidence(tmp_path / "alone", is_compared=False).path) == ""


def test_a_cell_whose_evidence_contradicts_it_fails_and_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_evidence(tmp_path / "run")
    seen, checks = Observation(0, "", history_of(())), (Check("trajectory", "passed", "identical"),)
    case = CaseResult(run.path, (), seen, checks, ExitCode.OK, ())
    monkeypatch.setattr("engine.harness.case_runner.run_case", lambda *given: case)
    monkeypatch.setattr("engine.harness.case.case_of_file", lambda loaded: None)
    run.trajectory.write_text("")
    found = _checked("a/b", None, None, keep=False)  # type: ignore[arg-type]
    assert (found.verdict, run.path.exists()) == ("failed (mismatch)", True)
    assert found.text.startswith("evidence: trajectory.csv: it ends after 0 bytes, and the run wrote ")
    assert found.text in junit_xml("m", [found])
