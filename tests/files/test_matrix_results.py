"""Results on disk: they are appended, the last line of a cell counts, and an unfinished line is ignored."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from engine.core.checks.cell_result import CellResult
from engine.core.errors import NothingMatchedError, StorageError
from engine.core.history.process_records import Result
from engine.files.matrix_results import RESULTS, append_result, new_folder, newest_folder, read_results, usual_seconds


def cell(name: str, result: Result = "passed", seconds: float = 1.0) -> CellResult:
    return CellResult(name, result, "", "", "kill", seconds, 0, "20260102-030405-a-0a1f", {"stage": "first"})


def test_the_last_result_of_a_cell_counts(tmp_path: Path) -> None:
    for each in (cell("a", "failed"), cell("b"), cell("a")):
        append_result(tmp_path, each)
    assert read_results(tmp_path) == {"a": cell("a"), "b": cell("b")}
    assert len((tmp_path / RESULTS).read_text().splitlines()) == 3


def test_nothing_yet(tmp_path: Path) -> None:
    assert read_results(tmp_path) == {}


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    append_result(tmp_path, cell("a"))
    append_result(tmp_path, cell("b"))
    path = tmp_path / RESULTS
    path.write_bytes(path.read_bytes()[:-9])
    assert list(read_results(tmp_path)) == ["a"]
    append_result(tmp_path, cell("c"))
    assert list(read_results(tmp_path)) == ["a", "c"]


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(NothingMatchedError, match="no run of the matrix 'm'"):
        newest_folder(tmp_path, "m")
    old = new_folder(tmp_path, "m", datetime(2026, 1, 2, 3, 4, 5), "ffff")
    new = new_folder(tmp_path, "m", datetime(2026, 1, 2, 3, 4, 6), "0000")
    new_folder(tmp_path, "m-other", datetime(2026, 1, 2, 3, 4, 7), "0000")
    assert old != new
    assert newest_folder(tmp_path, "m") == new
    assert new.stat().st_mode & 0o777 == 0o700


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="try --results"):
        new_folder(tmp_path / "file", "m", datetime(2026, 1, 2), "ffff")


def test_usual_times_are_medians(tmp_path: Path) -> None:
    for name, seconds in (("x", 1.0), ("y", 9.0), ("z", 2.0)):
        (tmp_path / name).mkdir()
        append_result(tmp_path / name, cell("a", seconds=seconds))
    files = [tmp_path / "x", tmp_path / "y" / RESULTS, tmp_path / "z"]
    assert usual_seconds(files) == {"a": 2.0}
