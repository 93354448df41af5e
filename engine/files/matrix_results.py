"""The results of a matrix run: ``results.jsonl`` in its folder, one line per finished cell.

Rules: a result is passed to the kernel before the next cell starts, so a killed run keeps its results. If a cell was
run again, its last line counts. An unfinished line, left by a killed writer, is ignored.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from statistics import median

from engine.codec.values import read, text_of
from engine.core.checks.cell_result import CellResult
from engine.core.errors import InvariantError, NothingMatchedError
from engine.files.atomic_write import closing_fd, make_folder, open_to_append, storage_errors
from engine.files.run_folder import RUN_NAME, RunFolder, run_names

RESULTS = "results.jsonl"
MATRICES = "matrices"


def new_folder(results: Path, name: str, now: datetime, hex4: str) -> Path:
    """Creates and returns the folder of a new run of a matrix in `results`; raises StorageError."""
    folder = results / MATRICES / f"{now:%Y%m%d-%H%M%S}-{name}-{hex4}"
    make_folder(folder.parent, results, "try --results")
    with storage_errors("make", folder, "try --results"):
        folder.mkdir(mode=0o700)
    return folder


def newest_folder(results: Path, name: str) -> Path:
    """Returns the folder of this user's newest run of a matrix, to resume it; raises NothingMatchedError."""
    pattern = rf".{{15}}-{re.escape(name)}-.{{4}}"
    folders = [results / MATRICES / run for run in run_names(results / MATRICES) if re.fullmatch(pattern, run)]
    newest = next((folder for folder in reversed(folders) if RunFolder(folder).is_own), None)
    if newest is None:
        raise NothingMatchedError(f"no run of the matrix {name!r} in {str(results)!r} to resume")
    return newest


def append_result(folder: Path, result: CellResult) -> None:
    """Appends one result. Raises StorageError if it could not be written."""
    line = f"{text_of(result)}\n".encode()
    with closing_fd(open_to_append(folder / RESULTS, is_read=True)) as fd, storage_errors("write", folder / RESULTS):
        size = os.fstat(fd).st_size
        # An unfinished line is terminated first, so that it damages no other.
        os.write(fd, line if not size or os.pread(fd, 1, size - 1) == b"\n" else b"\n" + line)


def read_results(path: Path) -> dict[str, CellResult]:
    """Returns the last result of every cell in a file, or in its folder; none if absent. Raises StorageError."""
    path = path / RESULTS if path.is_dir() else path
    with storage_errors("read", path):
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
    results = {}
    for line in lines:
        try:
            result = read(line, CellResult, "result", is_whole=False)
        except InvariantError:
            continue
        if not result.run or re.fullmatch(RUN_NAME, result.run):  # it names a folder, to which a page may be written
            results[result.cell] = result
    return results


def usual_seconds(paths: Iterable[Path]) -> dict[str, float]:
    """Returns the median seconds of each cell over several files of results; raises StorageError."""
    times: dict[str, list[float]] = {}
    for path in paths:
        for result in read_results(path).values():
            times.setdefault(result.cell, []).append(result.seconds)
    return {cell: median(seconds) for cell, seconds in times.items()}
