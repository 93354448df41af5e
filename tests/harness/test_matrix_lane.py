"""The exceptions in the workers of a cell: those of the user's code are shown with the name of the cell."""

from __future__ import annotations

from pathlib import Path

import pytest

from bamboo_cli.matrix import _tell
from engine.core.checks.cell_result import CellResult, from_plain
from engine.core.checks.expectations import Observed
from engine.core.errors import ExitCode
from engine.core.history.run_history import history_of
from engine.core.history.run_records import ConfirmedRecord, RaisedRecord
from engine.harness.cases.case_result import CaseResult

INJECTED = "RuntimeError: injected by fault 'fault-1'"
RECORDS = (
    RaisedRecord(of=1, step=3, error=INJECTED),
    ConfirmedRecord(fault="fault-1", how=f"raised: {INJECTED}"),
    RaisedRecord(of=2, step=4, error="ValueError: mine", place="the loss", file="mine.py", line=3, function="loss"),
)


def test_an_exception_that_no_fault_raised_is_shown_with_the_cell(capsys: pytest.CaptureFixture[str]) -> None:
    """A cell that survived a mistake of the user's passed without a word about it."""
    seen = Observed(0, "", history_of(RECORDS))
    case = CaseResult(Path("run"), (), seen, (), ExitCode.OK, ())
    raised = case.exceptions()
    assert raised == ("worker 2 raised ValueError: mine, in the loss of step 4 (mine.py:3, in loss)",)
    cell = CellResult("kill/B", "passed", "", "", "kill", 1.0, 0, "", raised=raised)
    assert case.as_dict()["exceptions"] == raised
    assert from_plain(cell.to_plain()) == cell
    _tell(1, 2, cell, 3.0)
    assert capsys.readouterr().err.splitlines()[1] == f"    kill/B: {raised[0]}"
