"""Benchmarks on disk: one CSV per measurement, ``<results>/bench/<name>-<time>.csv``, one line per row."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from datetime import datetime
from io import StringIO
from pathlib import Path

from engine.bench.figures.rows import COLUMNS, BenchRow
from engine.files.atomic_write import make_folder, write_atomically


def bench_folder(results: Path) -> Path:
    """Returns the folder of benchmarks; makes it if it does not exist.

    Raises:
        StorageError: it cannot be made.
    """
    folder = results.absolute() / "bench"
    make_folder(folder, results.absolute(), "try --results")
    return folder


def write_bench(folder: Path, name: str, now: datetime, rows: Sequence[BenchRow]) -> Path:
    """Writes the rows of one benchmark and returns the path; a value of None is empty.

    Raises:
        StorageError: the file could not be written.
    """
    text = StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(row.as_dict() for row in rows)
    path = folder / f"{name}-{now:%Y%m%d-%H%M%S}.csv"
    write_atomically(path, text.getvalue())
    return path
