"""The trajectory of a twin is read back as it was kept, and changed code has another hash."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.checks.trajectory import TrajectoryRow
from engine.core.errors import StorageError
from engine.files.trajectory_file import keep_twin, kept_twin, source_hash

ROWS = [TrajectoryRow(0, 0, "ab", "cd", 0.1)]


def test_what_is_kept_comes_back_under_its_name_only(tmp_path: Path) -> None:
    results = tmp_path / "results"
    assert kept_twin(results, "a") is None
    keep_twin(results, "a", ROWS)
    assert kept_twin(results, "a") == ROWS
    assert kept_twin(results, "b") is None


def test_a_damaged_twin_is_not_taken_for_one(tmp_path: Path) -> None:
    keep_twin(tmp_path, "a", ROWS)
    (tmp_path / "twins" / "a.csv").write_text("x\n")
    with pytest.raises(StorageError):
        kept_twin(tmp_path, "a")


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "twins").write_text("")
    with pytest.raises(StorageError, match="twins"):
        keep_twin(tmp_path, "a", ROWS)


def test_each_changed_or_moved_source_changes_the_hash(tmp_path: Path) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "a.py").write_text("x = 1\n")
    first = source_hash(tmp_path)
    (tmp_path / "notes.txt").write_text("no source")
    assert source_hash(tmp_path) == first
    (tmp_path / "a.py").write_text("x = 2\n")
    second = source_hash(tmp_path)
    (tmp_path / "a.py").rename(tmp_path / "inner" / "a.py")
    assert len({first, second, source_hash(tmp_path)}) == 3
