"""Benchmarks on disk: one CSV per measurement, and a clear error if it cannot be written."""

from __future__ import annotations

import csv
from datetime import datetime
from pathlib import Path

import pytest

from engine.bench.figures import COLUMNS, BenchRow, bench_folder, write_bench
from engine.core.errors import StorageError

NOW = datetime(2030, 1, 2, 3, 4, 5)
ROWS = [
    BenchRow("1f1b, P=4", "time / ideal", 1.01, 1.04, 0.971, 1.02, True, 20),
    BenchRow("1f1b, P=4", "s", 1, 2, 0.5, None, None, 20),
]


def test_a_measurement_is_one_file_with_one_line_per_row(tmp_path: Path) -> None:
    path = write_bench(bench_folder(tmp_path), "pipeline", NOW, [each.as_dict() for each in ROWS])
    assert path == tmp_path / "bench" / "pipeline-20300102-030405.csv"
    with path.open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == list(COLUMNS)
    assert lines == [
        ["1f1b, P=4", "time / ideal", "1.01", "1.04", "0.971", "1.02", "True", "20"],
        ["1f1b, P=4", "s", "1", "2", "0.5", "", "", "20"],
    ]


def test_a_folder_that_cannot_be_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot make '.*/file/bench': Not a directory \(try --results\)$"):
        bench_folder(tmp_path / "file")
